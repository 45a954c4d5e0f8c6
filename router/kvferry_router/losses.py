"""The legs that a request has lost: which pods it avoids, how long it looks for another, and when it gives up. Pure.

Rules:

- A pod that lost the request's leg is left out of the next choice. When no other pod is left and the request may wait,
  it looks again after a pause, and then takes any pod but those that broke the protocol: the same one may be back.
- New tokens end an interruption: pods and pauses count from the next loss. The time to wait for a pod counts from the
  last sign of life of a leg; one that its pod took and lost lived until then.
- Legs that their pods never took (busy, draining, unreachable) cost time, not losses.
- Losses in a row that brought no token may be the request's own doing: after ``Limits.barren_losses`` of them it is
  tried no further, whatever pods are left.
"""

from kvferry_router import failures
from kvferry_router.flow_messages import Failure, GaveUp, Kind
from kvferry_router.leg_faults import LEG_FAILURES, LOST, Fault
from kvferry_wire.limits import Limits


class Losses:
    """Of one request."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.causes: list[Fault] = []  # of decode legs that had begun the answer
        self._broken: dict[Kind, set[str]] = {"prefill": set(), "decode": set()}  # for ever
        self._tried: dict[Kind, set[str]] = {"prefill": set(), "decode": set()}  # since the last pause or token
        self._taken = 0
        self._barren = 0
        self._tries = 0  # decode legs lost since the last token
        self._pauses = 0
        self._since: float | None = None  # since when there is no leg that lives
        self.prefill_is_full = False  # the last prefill leg was not taken for want of room
        self.error: Failure = failures.NO_CAPACITY  # what the client is told when no pod is left

    def __repr__(self) -> str:
        return f"Losses(taken={self._taken}, barren={self._barren}, since={self._since}, causes={self.causes})"

    def add(self, kind: Kind, pod: str, how: Fault, *, taken: bool, gained: bool, now: float) -> None:
        """A leg is lost. ``taken``: its pod had begun it; ``gained``: tokens came of it."""
        self._tried[kind].add(pod)
        if kind == "prefill":
            self.prefill_is_full = how in ("busy", "draining")
        if how == "protocol":
            self._broken[kind].add(pod)
        if taken and how in LOST:
            self._taken += 1
            self._barren = 0 if gained else self._barren + 1
        if how == "moved":
            self._taken += 1  # no fault of anybody's, but it has to come to an end
        if kind == "decode":
            if self._since is None or (taken and how in LOST):
                self._since = now
            self._tries += 1
            # The last reason is told, but a full service is told as such.
            if self._tries == 1 or LEG_FAILURES[how] is failures.BUSY:
                self.error = LEG_FAILURES[how]

    def alive(self) -> None:
        """A decode leg lives."""
        self._since = None

    def gained(self) -> None:
        """Tokens came: whatever was interrupted goes on."""
        self._barren = self._pauses = self._tries = 0
        self._tried = {"prefill": set(), "decode": set()}

    def excluded(self, kind: Kind) -> frozenset[str]:
        """Pods that the next choice leaves out."""
        return frozenset(self._tried[kind] | self._broken[kind])

    def why_give_up(self, *, patient: bool) -> GaveUp | None:
        """Why no further pod may be tried; ``None`` while one may. ``patient``: there is an answer to be saved."""
        if self._barren >= self._limits.barren_losses:
            return "barren"
        if self._taken >= self._limits.leg_losses:
            return "losses"
        if not patient and self._tries >= self._limits.decode_attempts:
            return "no_pod"
        return None

    def worth_waiting_until(self, now: float, *, patient: bool) -> float:
        """For how long a decode pod is waited for. A full service is told as such at once, unless ``patient``."""
        since = now if self._since is None else self._since
        if patient:
            return since + self._limits.resume_wait_s
        return since if self.error is failures.BUSY else since + self._limits.capacity_wait_s

    def pause(self, now: float, until: float) -> float | None:
        """No pod was left: when to look again, at any pod that did not break the protocol; ``None``: time is up."""
        if now >= until:
            return None
        pause = min(self._limits.resume_pause_s * (1 << self._pauses), self._limits.resume_longest_pause_s)
        self._pauses += 1
        self._tried = {"prefill": set(), "decode": set()}
        return min(now + pause, until)
