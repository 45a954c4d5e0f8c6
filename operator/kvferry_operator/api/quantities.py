"""Kubernetes quantities and durations as text, and what they are in bytes, cores and seconds."""

import re
from fractions import Fraction

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
# Positive, and a fraction only with a unit. Whether it is a whole number of bytes only `parse_bytes` knows.
BYTES_PATTERN = r"^([0-9]*[1-9][0-9]*|([0-9]*[1-9][0-9]*(\.[0-9]+)?|[0-9]+\.[0-9]*[1-9][0-9]*)(k|M|G|T|Ki|Mi|Gi|Ti))$"
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?", re.ASCII)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", re.ASCII)
_SUFFIX = {
    None: Fraction(1),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
}
_UNIT_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}
MAX_TEXT = 32


def parse_quantity(text: str) -> Fraction:
    """A quantity such as ``512Mi``, ``2`` or ``500m`` as an exact number. Raises ``ValueError`` for any other text."""
    match = _QUANTITY.fullmatch(text) if len(text) <= MAX_TEXT else None
    if match is None:
        raise ValueError(f"not a quantity: {text[:MAX_TEXT]!r}")
    return Fraction(match[1]) * _SUFFIX[match[2]]


def parse_bytes(text: str) -> int:
    """A quantity that is a whole, positive number of bytes. Raises ``ValueError`` otherwise."""
    value = parse_quantity(text)
    if value.denominator != 1 or value < 1:
        raise ValueError(f"not a whole number of bytes: {text!r}")
    return int(value)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as ``15s``, ``1m30s`` or ``250ms``. Raises ``ValueError`` for any other text."""
    if len(text) > MAX_TEXT or re.fullmatch(DURATION_PATTERN, text, re.ASCII) is None or text.endswith("\n"):
        raise ValueError(f"not a duration: {text[:MAX_TEXT]!r}")
    return float(sum(Fraction(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION_PART.findall(text)))


def format_seconds(seconds: float) -> str:
    """The shortest decimal text of a number of seconds, as the processes' flags take it: ``600``, ``0.25``."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
