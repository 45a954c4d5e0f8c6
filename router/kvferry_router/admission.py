"""Admission: how many requests one router works on, how many wait, and who is turned away.

Pure. A request that arrives runs, waits or is refused; one that leaves lets the next waiting one run. Before that its
body must find room.
"""

from collections import OrderedDict
from typing import Literal

from kvferry_wire.limits import Limits


class Admission:
    """Counts and a first-come queue.

    ``waiting`` requests must be withdrawn by ``leave`` when they give up; ``running`` ones when they end. Both are
    idempotent, so that an end by any way counts once.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: set[str] = set()
        self._waiting: OrderedDict[str, None] = OrderedDict()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def arrive(self, request: str) -> Literal["run", "wait", "full"]:
        """Take a request in, or refuse it."""
        if len(self._running) < self._limits.inflight and not self._waiting:
            self._running.add(request)
            return "run"
        if len(self._waiting) < self._limits.queue:
            self._waiting[request] = None
            return "wait"
        return "full"

    def leave(self, request: str) -> list[str]:
        """A request is over, or waits no more; returns those that run from now on."""
        self._running.discard(request)
        self._waiting.pop(request, None)
        started = []
        while self._waiting and len(self._running) < self._limits.inflight:
            following, _ = self._waiting.popitem(last=False)
            self._running.add(following)
            started.append(following)
        return started


class BodyBudget:
    """The bytes that the bodies of all requests may take: each is held as long as its request."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: dict[str, int] = {}
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def take(self, request: str, content_length: int | None) -> bool:
        """Make room for a body before it is read; false when there is none. An unknown length is the largest."""
        most = self._limits.body_bytes
        size = most if content_length is None else min(content_length, most)
        if self._bytes + size > self._limits.bodies_bytes:
            return False
        self._set(request, size)
        return True

    def read(self, request: str, size: int) -> None:
        """The body is here, and is this long."""
        self._set(request, size)

    def give_back(self, request: str) -> None:
        """The request is over; idempotent."""
        self._set(request, 0)

    def _set(self, request: str, size: int) -> None:
        self._bytes += size - self._held.pop(request, 0)
        if size:
            self._held[request] = size
