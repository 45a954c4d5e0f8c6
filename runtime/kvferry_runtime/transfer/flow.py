"""One pull, from the moment its leg is accepted: hold the lease, read the blocks, have the lease confirmed.

Pure: events and the time in, effects out. The blocks are valid only if the owner answers ``held`` to a `Release` that
it took after it had copied the last byte; every other end voids them and names the reason. Whatever happens, a flow
that was given blocks finishes exactly once, and not before the back end writes into them no more.

    HOLDING -> CONNECTING -> QUEUED -> READING [-> RELEASING] -> VALIDATING -> DONE
    a failure or a drop ends in FAILED or CANCELLED, by way of FAILING or CANCELLING while a read may still write;
    LOST is a failure before the engine gave blocks: it waits for them, to say so.
"""

import enum
import math
from collections.abc import Callable, Mapping

from kvferry_runtime.transfer.flow_messages import (
    Answered,
    BlocksGiven,
    BytesArrived,
    Drop,
    Finished,
    FlowEffect,
    FlowEvent,
    Handshake,
    Read,
    ReadDone,
    ReadStarted,
    ReadStopped,
    Refused,
    ReleaseSent,
    SendFailed,
    SendRelease,
    SendRenew,
    StopRead,
    Tick,
    Welcomed,
)
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import LeaseAnswer
from kvferry_wire.limits import Limits


class FlowState(enum.Enum):
    """Where a pull is in its life."""

    HOLDING = "holding"  # the lease is renewed; the engine has no blocks yet
    LOST = "lost"  # failed before it had blocks
    CONNECTING = "connecting"  # blocks are there, the peer has not welcomed us yet
    QUEUED = "queued"  # waits for a place among the reads
    READING = "reading"  # bytes may be written into the blocks
    RELEASING = "releasing"  # they still may, but the owner has been asked to end the lease behind them
    FAILING = "failing"  # failed; the read may still write
    CANCELLING = "cancelling"  # dropped; the read may still write
    VALIDATING = "validating"  # all bytes are there; was the lease live throughout?
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FlowStep(enum.Enum):
    """What moves a pull on."""

    BLOCKS = "blocks"
    WELCOMED = "welcomed"
    STARTED = "started"
    RELEASE_SENT = "release sent"  # by the back end
    ALL_READ = "all read"
    CONFIRMED = "confirmed"
    FAIL = "fail"  # while the back end may write, or never began
    STOPPED = "stopped"  # the back end ended early and writes no more
    DROP = "drop"


_S, _E = FlowState, FlowStep

TRANSITIONS: Mapping[tuple[FlowState, FlowStep], FlowState] = {
    (_S.HOLDING, _E.BLOCKS): _S.CONNECTING,
    (_S.HOLDING, _E.FAIL): _S.LOST,
    (_S.HOLDING, _E.DROP): _S.CANCELLED,
    (_S.LOST, _E.BLOCKS): _S.FAILED,
    (_S.LOST, _E.DROP): _S.CANCELLED,
    (_S.CONNECTING, _E.WELCOMED): _S.QUEUED,
    (_S.CONNECTING, _E.FAIL): _S.FAILED,
    (_S.CONNECTING, _E.DROP): _S.CANCELLED,
    (_S.QUEUED, _E.STARTED): _S.READING,
    (_S.QUEUED, _E.STOPPED): _S.FAILED,
    (_S.QUEUED, _E.FAIL): _S.FAILING,
    (_S.QUEUED, _E.DROP): _S.CANCELLING,
    (_S.READING, _E.RELEASE_SENT): _S.RELEASING,
    (_S.READING, _E.ALL_READ): _S.VALIDATING,
    (_S.READING, _E.STOPPED): _S.FAILED,
    (_S.READING, _E.FAIL): _S.FAILING,
    (_S.READING, _E.DROP): _S.CANCELLING,
    (_S.RELEASING, _E.ALL_READ): _S.VALIDATING,
    (_S.RELEASING, _E.STOPPED): _S.FAILED,
    (_S.RELEASING, _E.FAIL): _S.FAILING,
    (_S.RELEASING, _E.DROP): _S.CANCELLING,
    (_S.FAILING, _E.RELEASE_SENT): _S.FAILING,
    (_S.FAILING, _E.ALL_READ): _S.FAILED,
    (_S.FAILING, _E.STOPPED): _S.FAILED,
    (_S.FAILING, _E.DROP): _S.FAILING,
    (_S.CANCELLING, _E.RELEASE_SENT): _S.CANCELLING,
    (_S.CANCELLING, _E.ALL_READ): _S.CANCELLED,
    (_S.CANCELLING, _E.STOPPED): _S.CANCELLED,
    (_S.CANCELLING, _E.DROP): _S.CANCELLING,
    (_S.VALIDATING, _E.CONFIRMED): _S.DONE,
    (_S.VALIDATING, _E.FAIL): _S.FAILED,
    (_S.VALIDATING, _E.DROP): _S.CANCELLED,
}
"""All that can happen."""

ENDS = frozenset({FlowState.DONE, FlowState.FAILED, FlowState.CANCELLED})
WITHOUT_BLOCKS = frozenset({FlowState.HOLDING, FlowState.LOST})
MOVING = frozenset({FlowState.READING, FlowState.RELEASING})
RENEWING = MOVING | {FlowState.HOLDING, FlowState.CONNECTING, FlowState.QUEUED}
STOPPING = frozenset({FlowState.FAILING, FlowState.CANCELLING})

_ANSWER_REASON: Mapping[LeaseAnswer, RecomputeReason] = {
    "expired": RecomputeReason.LEASE_EXPIRED,
    "unknown": RecomputeReason.LEASE_UNKNOWN,
}
# The owner has ended the lease itself: it needs no word from us.
_LEASE_IS_GONE = frozenset(_ANSWER_REASON.values())


class FlowError(ValueError):
    """The driver asked for what this state cannot do; nothing was changed."""


def advance(state: FlowState, step: FlowStep) -> FlowState:
    """The state after a step.

    Raises:
        FlowError: the state knows no such step.
    """
    try:
        return TRANSITIONS[state, step]
    except KeyError:
        raise FlowError(f"a pull that is {state.value} cannot go on by {step.value!r}") from None


class TransferFlow:
    """The decisions of one pull.

    Args:
        lease_s: the lease's duration, from the handle.
        deadline: when the leg's time is up, on the driver's clock.
        limits: `renew_fraction`, `first_renew_s`, `control_reply_s`, `connect_s`, `transfer_floor_s` and
            `transfer_min_bytes_per_s`.
        next_id: gives message ids, each once in this reader's incarnation.
        now: the moment of hold; `begin` gives the first effects.
    """

    def __init__(
        self, *, lease_s: float, deadline: float, limits: Limits, next_id: Callable[[], int], now: float
    ) -> None:
        self.state = FlowState.HOLDING
        self.reason: RecomputeReason | None = None
        self._lease_s = lease_s
        self._renew_s = lease_s * limits.renew_fraction
        self._resend_s = min(limits.control_reply_s, self._renew_s, limits.transfer_floor_s / 4)
        self._deadline = deadline
        self._limits = limits
        self._next_id = next_id
        self._welcomed = False
        self._renew_id: int | None = None  # awaits its answer
        self._renew_first_sent = now
        self._renew_at = now + limits.first_renew_s
        self._live_until = now + lease_s  # at least so long, if the owner had heard of us by now
        self._release_id: int | None = None
        self._release_at = now
        self._given_at = now
        self._step_deadline = deadline  # of the state the flow is in
        self._nbytes = 0
        self._arrived = 0

    # ---- the driver's side ---------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[FlowEffect]:
        """The first effects: shake hands early, and renew from now on.

        Most pulls are over before their first renewal is worth its way: it waits for `Limits.first_renew_s`.
        """
        return [Handshake(), self._renew(now)] if now >= self._renew_at else [Handshake()]

    def handle(self, event: FlowEvent, now: float) -> list[FlowEffect]:
        """Take one event.

        Raises:
            FlowError: an event of the driver's own making (`BlocksGiven`, `ReadStarted`, `ReleaseSent`,
                `ReadDone`, `ReadStopped`, `Drop`) that the state does not know. What comes from the network is never
                an error, only late.
        """
        match event:
            case BlocksGiven(nbytes):
                return self._blocks_given(nbytes, now)
            case Welcomed():
                return self._on_welcome(now)
            case Refused(reason):
                return self._fail(reason, now) if self.state in {FlowState.HOLDING, FlowState.CONNECTING} else []
            case Answered(message_id, answer):
                return self._on_answer(message_id, answer, now)
            case ReadStarted():
                self.state = advance(self.state, FlowStep.STARTED)
                self._step_deadline = self._read_deadline(now)
                return []
            case BytesArrived(nbytes):
                if self.state in MOVING and nbytes > self._arrived:
                    self._step_deadline += (nbytes - self._arrived) / self._limits.transfer_min_bytes_per_s
                    self._arrived = nbytes
                return []
            case ReleaseSent():
                self.state = advance(self.state, FlowStep.RELEASE_SENT)
                self._live_until = math.inf  # it ends with the release, at a time that the owner knows alone
                return []
            case ReadDone(answer):
                return self._read_done(answer, now)
            case ReadStopped(reason):
                return self._read_stopped(reason, now)
            case Drop(reason):
                return self._drop(reason, now)
            case Tick():
                return self._tick(now)

    def next_wake(self) -> float:
        """When `Tick` is due next, if nothing happens before."""
        if self.state in ENDS or self.state is FlowState.LOST or self.state in STOPPING:
            return float("inf")
        wake = min(self._deadline, self._step_deadline)
        if self.state in RENEWING:
            return min(wake, self._renew_at, self._live_until)
        return min(wake, self._release_at)

    @property
    def ended(self) -> bool:
        """Nothing more comes out."""
        return self.state in ENDS

    def __repr__(self) -> str:
        why = f", {self.reason.value}" if self.reason else ""
        return f"TransferFlow({self.state.value}{why}, {self._arrived}/{self._nbytes} bytes)"

    # ---- inside --------------------------------------------------------------------------------------------------

    def _blocks_given(self, nbytes: int, now: float) -> list[FlowEffect]:
        self.state = advance(self.state, FlowStep.BLOCKS)
        self._nbytes = nbytes
        self._given_at = now
        if self.state is FlowState.FAILED:
            return [self._finished(now)]
        self._step_deadline = now + self._limits.connect_s
        return self._on_welcome(now) if self._welcomed else []

    def _on_welcome(self, now: float) -> list[FlowEffect]:
        self._welcomed = True
        if self.state is not FlowState.CONNECTING:
            return []
        self.state = advance(self.state, FlowStep.WELCOMED)
        self._step_deadline = self._deadline
        self._release_id = self._next_id()
        return [Read(self._release_id)]

    def _on_answer(self, message_id: int, answer: LeaseAnswer, now: float) -> list[FlowEffect]:
        if self.state is FlowState.VALIDATING and message_id == self._release_id:
            if answer == "held":
                self.state = advance(self.state, FlowStep.CONFIRMED)
                return [self._finished(now)]
            return self._fail(_ANSWER_REASON[answer], now)
        if self.state in RENEWING and message_id == self._renew_id:
            if answer != "held" and self.state is FlowState.RELEASING:
                self._renew_id, self._renew_at = None, math.inf  # released or expired: that answer will tell
                return []
            if answer != "held":
                return self._fail(_ANSWER_REASON[answer], now)
            self._renew_id = None
            # The owner extended it when it heard us, which was not before we first spoke.
            self._live_until = max(self._live_until, self._renew_first_sent + self._lease_s)
            self._renew_at = max(self._renew_first_sent + self._renew_s, now)
        return []

    def _read_done(self, answer: LeaseAnswer | None, now: float) -> list[FlowEffect]:
        self.state = advance(self.state, FlowStep.ALL_READ)
        self._arrived = self._nbytes
        if self.state is not FlowState.VALIDATING:
            return [self._finished(now)]
        assert self._release_id is not None  # the read began with it
        if answer is not None:
            return self._on_answer(self._release_id, answer, now)
        # If the back end has sent it, this is a repeat: the owner answers the same again.
        self._release_at = now + self._resend_s
        self._step_deadline = now + self._limits.transfer_floor_s
        return [SendRelease(self._release_id)]

    def _read_stopped(self, reason: RecomputeReason, now: float) -> list[FlowEffect]:
        was = self.state
        self.state = advance(self.state, FlowStep.STOPPED)
        if was in STOPPING:
            return [self._finished(now)]
        self.reason = reason
        return [SendFailed(self._next_id(), reason.value), self._finished(now)]

    def _drop(self, reason: str, now: float) -> list[FlowEffect]:
        was = self.state
        self.state = advance(self.state, FlowStep.DROP)
        if was in STOPPING:
            return []
        tell: list[FlowEffect] = [] if was is FlowState.LOST else [SendFailed(self._next_id(), reason)]
        self.reason = RecomputeReason.CANCELLED
        if self.state is FlowState.CANCELLING:
            return [*tell, StopRead()]
        return tell if was in WITHOUT_BLOCKS else [*tell, self._finished(now)]

    def _fail(self, reason: RecomputeReason, now: float) -> list[FlowEffect]:
        self.state = advance(self.state, FlowStep.FAIL)
        self.reason = reason
        effects: list[FlowEffect] = []
        if reason not in _LEASE_IS_GONE:
            effects.append(SendFailed(self._next_id(), reason.value))
        if self.state is FlowState.FAILING:
            effects.append(StopRead())
        elif self.state is FlowState.FAILED:
            effects.append(self._finished(now))
        return effects

    def _tick(self, now: float) -> list[FlowEffect]:
        if self.state is FlowState.VALIDATING:
            if now >= min(self._deadline, self._step_deadline):
                return self._fail(RecomputeReason.DEADLINE, now)
            if now >= self._release_at and self._release_id is not None:
                self._release_at = now + self._resend_s
                return [SendRelease(self._release_id)]
            return []
        if self.state not in RENEWING:
            return []
        if now >= self._deadline:
            return self._fail(RecomputeReason.DEADLINE, now)
        if now >= self._step_deadline:
            connecting = self.state is FlowState.CONNECTING
            return self._fail(RecomputeReason.PEER_DEAD if connecting else RecomputeReason.DEADLINE, now)
        if now >= self._live_until:
            return self._fail(RecomputeReason.PEER_DEAD, now)
        return [self._renew(now)] if now >= self._renew_at else []

    def _renew(self, now: float) -> SendRenew:
        if self._renew_id is None:
            self._renew_id = self._next_id()
            self._renew_first_sent = now
        self._renew_at = now + self._resend_s  # the same message again, unless it is answered before
        return SendRenew(self._renew_id)

    def _read_deadline(self, now: float) -> float:
        return now + self._limits.transfer_floor_s

    def _finished(self, now: float) -> Finished:
        return Finished(self.reason, now - self._given_at, self._arrived)
