"""Kubernetes objects of a plan, as plain dicts. Pure: each builder is a function of its arguments alone."""
