"""A timer that can be moved to an earlier time."""

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Rings once at the earliest of the times it was set to; then it can be set again.

    It keeps the time itself: what an event loop gives back for a time that has come already need not know it (uvloop's
    does not).

    Args:
        ring: called in the loop with the time that it was set to, in the loop's seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[float], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._due = math.inf
        self._handle: asyncio.Handle | None = None

    def set(self, due: float) -> None:
        """Ring at this time, in the loop's seconds; nothing changes where it is to ring earlier."""
        if due < self._due:
            self.cancel()
            self._due = due
            self._handle = self._loop.call_at(due, self._rings)

    def cancel(self) -> None:
        """Do not ring."""
        self._due = math.inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """Never ring again, and let go of who was called: the owner of an alarm is then in no cycle with it."""
        self.cancel()
        self._ring = _unheard

    def _rings(self) -> None:
        due, self._due, self._handle = self._due, math.inf, None
        self._ring(due)


def _unheard(_: float) -> None:
    """What a closed alarm calls."""
