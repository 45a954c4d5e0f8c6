"""Which pods of a role could answer, and when: what a refusal is judged by."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from e2e.harness.asking import Answer
from e2e.harness.kubectl import Object
from e2e.harness.service import Service
from e2e.harness.waiting import wait_for
from e2e.harness.watching import SLICES, ready_pods, watching

# Before and after a moment: what Kubernetes tells of a pod that was killed or wedged, and what a router knows of one
# that has come, may be late by less, on a machine that is overloaded too.
SETTLED_S = 10.0


class Readiness:
    """The times for which EndpointSlices called a role's pods ready, on this machine's monotonic clock."""

    def __init__(self, role: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._role = role
        self._clock = clock
        self._slices: dict[str, set[str]] = {}
        self._since: dict[str, float] = {}  # pods that are ready now
        self._times: list[tuple[str, float, float]] = []  # pod, from, to
        self._lock = threading.Lock()

    def take_slice(self, kind: str, found: Object) -> None:
        """One event of the EndpointSlices' watch."""
        if found["metadata"]["labels"].get("app.kubernetes.io/component") != self._role:
            return
        with self._lock:
            self._slices[found["metadata"]["uid"]] = set() if kind == "DELETED" else ready_pods(found)
            self._change(set().union(*self._slices.values()), self._clock())

    def _change(self, ready: set[str], now: float) -> None:
        for name in self._since.keys() - ready:
            self._times.append((name, self._since.pop(name), now))
        for name in ready - self._since.keys():
            self._since[name] = now

    def ready(self) -> set[str]:
        """Now."""
        with self._lock:
            return set(self._since)

    def settled(self, moment: float) -> set[str]:
        """Pods that were ready for `SETTLED_S` then and stayed so for as long: they had to take what came."""
        with self._lock:
            times = [*self._times, *((name, since, float("inf")) for name, since in self._since.items())]
        return {name for name, since, until in times if since <= moment - SETTLED_S and moment + SETTLED_S <= until}

    def refused(self, answers: Iterable[Answer]) -> list[str]:
        """Those that ended in an error though a pod had to take them, each with the pods that had to."""
        return [
            f"{answer.told()}, though {', '.join(sorted(pods))} had to take it"
            for answer in answers
            if not answer.whole and (pods := self.settled(answer.ended_at))
        ]


@contextmanager
def readiness(service: Service, role: str) -> Iterator[Readiness]:
    """Watch a role's pods while the body of the ``with`` runs; those that are ready already count from its start on."""
    seen = Readiness(role)
    with watching(service, {SLICES: seen.take_slice}):
        wait_for(seen.ready, f"the watch of {service.name}'s {role} pods", 30, service.told)
        yield seen
