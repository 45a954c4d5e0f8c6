"""Rotary embedding of a step's queries and keys, and its K and V written to the paged cache."""
