"""Attention through block tables: the interface, its back ends, and a naive twin for tests."""
