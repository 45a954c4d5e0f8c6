"""Names in a message: the first few, and how many more there are."""

from collections.abc import Iterable

SHOWN = 3


def some(names: Iterable[str]) -> str:
    """The first ``SHOWN`` of the names in their order, each once."""
    ordered = sorted(set(names))
    shown = ", ".join(ordered[:SHOWN])
    return f"{shown} and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else shown
