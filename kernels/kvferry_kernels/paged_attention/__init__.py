"""Causal attention of a step's queries through block tables."""
