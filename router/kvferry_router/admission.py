"""Admission: how many requests one router works on, how many wait, and who is turned away.

Pure. A request that arrives runs, waits or is refused; one that leaves lets the next waiting one run.
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
