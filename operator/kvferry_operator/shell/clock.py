"""Clocks of this process. The one for leadership goes on while the machine is suspended."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], float]  # seconds from any start, never back
_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds since the machine started, those it was suspended included."""
    return time.clock_gettime(_BOOT)


def stamp() -> str:
    """The time of day as statuses have it: RFC 3339, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp() -> str:
    """The time of day as Leases and Events have it: RFC 3339 with microseconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
