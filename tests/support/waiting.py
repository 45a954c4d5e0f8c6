"""Waiting for a condition with a deadline."""

import time
from collections.abc import Callable

POLL_S = 0.05


def wait_for(true: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Return as soon as a condition holds; fail with what was waited for after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what}")
        time.sleep(POLL_S)
