"""What the router knows of each pod, and whether it may be used. Pure: probes and streams come in as values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvferry_router.discovery.endpoints import Endpoint
from kvferry_router.index.feed import StateFeed
from kvferry_wire import PROTOCOL_VERSION
from kvferry_wire.limits import Limits
from kvferry_wire.pod import PodInfo

# Late answers in a row that put a pod out. One may be this process's own delay; a refused connection is never.
_LATE_LIMIT = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer to "are you ready?"."""

    result: Literal["ready", "not_ready", "refused", "late"]
    reason: str = ""


class PodRecord:
    """One pod: how to reach it, what it says of itself, whether it answers, and its state stream."""

    def __init__(self, endpoint: Endpoint, limits: Limits) -> None:
        self.endpoint = endpoint
        self.info: PodInfo | None = None
        self.feed = StateFeed(limits)
        self.answers = False
        self.reason = "not asked yet"
        self.info_due = True  # ask again before using it
        self._late = 0

    def __repr__(self) -> str:
        return f"PodRecord({self.endpoint.name}, {self.reason or 'ready'})"

    @property
    def name(self) -> str:
        return self.endpoint.name

    def probed(self, probe: Probe) -> None:
        """Take a probe's result. A pod that comes back must say again what it is before it is used."""
        if probe.result == "late":
            self._late += 1
            if self._late < _LATE_LIMIT:
                return
        else:
            self._late = 0
        if probe.result == "ready":
            if not self.answers:
                self.answers = True
                self.info_due = True
            self.reason = ""
        else:
            self._down(probe.reason or probe.result)

    def suspected(self, reason: str) -> None:
        """A leg broke on it: it is out until its next good probe."""
        self._down(reason)

    def informed(self, info: PodInfo) -> bool:
        """Take what the pod says of itself; returns whether it is another incarnation than before."""
        new = self.info is not None and info.incarnation != self.info.incarnation
        self.info = info
        self.info_due = False
        return new

    def drains(self) -> bool:
        """Whether it takes nothing new and ends soon. What it said last counts, also when it says no more."""
        said = self.feed.load is not None and self.feed.load.draining
        return said or self.endpoint.ending or (self.info is not None and self.info.draining)

    def why_unusable(self, model: str) -> str:
        """The reason why no leg may go there; empty when one may."""
        if self.endpoint.withheld:
            return self.endpoint.withheld
        if not self.answers:
            return self.reason
        if self.info is None or self.info_due:
            return "it has not said what it is yet"
        if self.info.protocol_version != PROTOCOL_VERSION:
            return f"it speaks protocol {self.info.protocol_version}, this router {PROTOCOL_VERSION}"
        if self.info.model != model:
            return "it serves another model"
        if self.info.draining:
            return "draining"
        return ""

    def _down(self, reason: str) -> None:
        self.answers = False
        self.info_due = True
        self.reason = reason[:200]


class PodTable:
    """All pods that discovery names, by name."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._records: dict[str, PodRecord] = {}

    def __iter__(self) -> Iterator[PodRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def get(self, name: str) -> PodRecord | None:
        return self._records.get(name)

    def replace(self, endpoints: tuple[Endpoint, ...]) -> tuple[list[PodRecord], list[PodRecord]]:
        """Take discovery's word; returns the records that are new and those that are gone.

        A pod whose address or uid changed is gone and new; one that stays keeps its record, with what is now held
        against it.
        """
        named = {endpoint.name: endpoint for endpoint in endpoints}
        gone = []
        for record in self._records.values():
            endpoint = named.get(record.name)
            if endpoint is not None and endpoint.same_pod(record.endpoint):
                record.endpoint = endpoint
            else:
                gone.append(record)
        for record in gone:
            del self._records[record.name]
        new = [PodRecord(endpoint, self._limits) for endpoint in endpoints if endpoint.name not in self._records]
        for record in new:
            self._records[record.name] = record
        return new, gone
