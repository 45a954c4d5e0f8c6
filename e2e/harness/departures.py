"""How pods leave. A watch keeps the last word of each, since its object is gone when one could ask."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from e2e.harness.kubectl import Object
from e2e.harness.service import Service
from e2e.harness.waiting import wait_for
from e2e.harness.watching import PODS, SLICES, ready_pods, watching

# From the word that a pod terminates until it gets nothing new: a second, and more on a machine that is overloaded.
UNREADY_S = 3.0


@dataclass
class Departure:
    """One pod, as far as it has come. Moments are of this machine's monotonic clock."""

    last: Object = field(default_factory=dict)
    told_at: float | None = None  # Kubernetes said that it terminates
    unready_at: float | None = None  # no EndpointSlice calls it ready any more
    gone: bool = False

    @property
    def name(self) -> str:
        name: str = self.last["metadata"]["name"]
        return name

    @property
    def role(self) -> str:
        role: str = self.last["metadata"]["labels"]["app.kubernetes.io/component"]
        return role

    @property
    def unready_after_s(self) -> float:
        """From the word that it terminates until no new request is sent to it."""
        assert self.told_at is not None, f"{self.name} does not leave"
        assert self.unready_at is not None, f"{self.name} stays in an EndpointSlice as ready"
        return self.unready_at - self.told_at

    def ended(self) -> Object:
        """How its container ended."""
        (state,) = self.last["status"]["containerStatuses"]
        found: Object = state["state"].get("terminated", {})
        return found

    def left_s(self) -> float:
        """What it left of its grace. Negative: it took longer; whole seconds, as Kubernetes counts."""
        deadline = datetime.fromisoformat(self.last["metadata"]["deletionTimestamp"])
        return (deadline - datetime.fromisoformat(self.ended()["finishedAt"])).total_seconds()

    def told(self) -> str:
        ended = self.ended()
        return f"{self.name}: status {ended.get('exitCode')} {ended.get('reason')} {ended.get('message', '')}".rstrip()


class Departures:
    """The pods of a service that leave while this watches."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pods: dict[str, Departure] = {}
        self._slices: dict[str, set[str]] = {}  # slice -> names of pods that it calls ready
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Departure]:
        with self._lock:
            return iter([pod for pod in self._pods.values() if pod.told_at is not None])

    def wait_gone(self, count: int, seconds: float) -> list[Departure]:
        """The pods that left, once so many have and no other is leaving."""

        def look() -> list[Departure] | None:
            leaving = list(self)
            return leaving if len(leaving) >= count and all(pod.gone for pod in leaving) else None

        return wait_for(look, f"{count} pods to leave", seconds, self._service.told)

    def take_pod(self, kind: str, pod: Object) -> None:
        """One event of the pods' watch."""
        with self._lock:
            known = self._pods.setdefault(pod["metadata"]["uid"], Departure())
            known.last, known.gone = pod, kind == "DELETED"
            if known.told_at is None and "deletionTimestamp" in pod["metadata"]:
                known.told_at = time.monotonic()
                self._mark_unready()

    def take_slice(self, kind: str, found: Object) -> None:
        """One event of the EndpointSlices' watch."""
        with self._lock:
            self._slices[found["metadata"]["uid"]] = set() if kind == "DELETED" else ready_pods(found)
            self._mark_unready()

    def _mark_unready(self) -> None:
        ready = set().union(*self._slices.values())
        for pod in self._pods.values():
            if pod.told_at is not None and pod.unready_at is None and pod.name not in ready:
                pod.unready_at = time.monotonic()


@contextmanager
def departures(service: Service) -> Iterator[Departures]:
    """Watch a service's pods while the body of the ``with`` runs."""
    seen = Departures(service)
    with watching(service, {SLICES: seen.take_slice, PODS: seen.take_pod}):
        names = {pod["metadata"]["name"] for role in ("prefill", "decode", "router") for pod in service.pods(role)}
        wait_for(lambda: names <= {pod.name for pod in seen._pods.values()}, "the watch of the pods", 30)
        yield seen
