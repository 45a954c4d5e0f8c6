"""Waiting for what a cluster does, with a deadline and words for when it does not."""

import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.3

Seen = TypeVar("Seen")


def wait_for(look: Callable[[], Seen | None], what: str, seconds: float, why: Callable[[], str] = str) -> Seen:
    """What ``look`` returns as soon as it is true.

    Args:
        why: what to say of the state in which it never became true; it is asked once, at the end.

    Raises:
        AssertionError: after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what}. {why()}".rstrip())
        time.sleep(POLL_S)
