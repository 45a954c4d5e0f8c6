"""The legs of one request, one after the other: their numbers, the open one and its signs of life. Pure."""

from dataclasses import dataclass

from kvferry_router.flow_messages import AbortLeg, Computed, Effect, Ferried, FinishLeg, Kind
from kvferry_wire.limits import Limits


@dataclass(slots=True)
class Attempt:
    """The open leg.

    Attributes:
        lender: the pod whose KV it is to read, until it has said whether it has it.
        computed: the prompt is in its pod's KV.
        gained: ids came of it.
        sent: the client has bytes of it.
        asked_to_move: it may end in `Handoff`.
    """

    number: int
    kind: Kind
    pod: str
    heard_at: float
    lender: str | None = None
    computed: bool = False
    gained: bool = False
    sent: bool = False
    asked_to_move: bool = False

    def has_computed(self, out: list[Effect]) -> None:
        """The prompt is in KV; told once."""
        if not self.computed:
            self.computed = True
            out.append(Computed(self.kind, self.pod))

    def ferried(self, reason: str, out: list[Effect]) -> None:
        """Its pod says, once, whether it has the KV, or why not."""
        if self.lender is not None:
            out.append(Ferried(self.lender, self.pod, reason))
            self.lender = None


class Attempts:
    """Attempt numbers count all legs of a request, so that prefill and decode on one pod never share a tombstone."""

    def __init__(self, limits: Limits) -> None:
        self._stall_s = limits.stall_timeout_s
        self.opened = 0
        self.open: Attempt | None = None

    def __repr__(self) -> str:
        return f"Attempts(opened={self.opened}, open={self.open})"

    @property
    def the_open(self) -> Attempt:
        """The open leg, where there must be one."""
        assert self.open is not None
        return self.open

    def begin(self, kind: Kind, pod: str, now: float, *, lender: str | None = None) -> int:
        """The next leg; returns its number."""
        assert self.open is None
        self.open = Attempt(self.opened, kind, pod, now, lender)
        self.opened += 1
        return self.open.number

    def is_open(self, number: int) -> bool:
        return self.open is not None and self.open.number == number

    def heard(self, now: float) -> None:
        if self.open is not None:
            self.open.heard_at = now

    def stalls_at(self) -> float | None:
        """When the open leg has been silent for too long."""
        return None if self.open is None else self.open.heard_at + self._stall_s

    def abort(self, out: list[Effect]) -> None:
        """Give the open leg up, if there is one."""
        if self.open is not None:
            out.append(AbortLeg(self.open.number, self.open.pod))
            self.open = None

    def finish(self, out: list[Effect]) -> None:
        """The open leg has said all."""
        if self.open is not None:
            out.append(FinishLeg(self.open.number))
            self.open = None
