"""Ids that are unique without asking anyone."""

import secrets


def new_id(prefix: str) -> str:
    """``<prefix>-<96 random bits as hex>``."""
    return f"{prefix}-{secrets.token_hex(12)}"
