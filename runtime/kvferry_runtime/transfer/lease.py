"""The lease table: which prefilled KV is kept for a reader, and until when.

Pure: time comes in as seconds of any one monotonic clock, nothing is read, slept on or sent. A lease is *granted* when
its blocks are kept and its answer is not written yet, *held* from the moment that the answer is written (or the reader
is heard, whichever comes first), and then ends once, in one of four ways. Only `tick` judges expiry, so whoever drives
the table handles what has arrived before it judges. Nothing revives an ended lease.

Owners of blocks are told of each end exactly once, through `take_ended`; of the first renewal of a lease through
`take_taken`.
"""

import enum
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvferry_runtime.core.integrity import IntegrityError
from kvferry_runtime.core.messages import GrantLease, LeaseEnded, LeaseTaken
from kvferry_wire.control import LeaseAnswer, LeaseRef
from kvferry_wire.limits import Limits


class LeaseState(enum.Enum):
    """Where a lease is in its life."""

    GRANTED = "granted"
    HELD = "held"
    RELEASED = "released"
    FAILED = "failed"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


class LeaseEvent(enum.Enum):
    """What happens to a lease."""

    ANSWERED = "answered"  # the prefill answer was written
    RENEW = "renew"
    RELEASE = "release"
    FAIL = "fail"  # the reader gives it up
    WITHDRAW = "withdraw"  # the owner gives it up: answer not delivered, epoch raised, shutdown
    EXPIRE = "expire"


LeaseEndedWhy = Literal["released", "failed", "expired", "withdrawn"]

_S, _E = LeaseState, LeaseEvent

TRANSITIONS: Mapping[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (_S.GRANTED, _E.ANSWERED): _S.HELD,
    (_S.GRANTED, _E.RENEW): _S.HELD,
    (_S.GRANTED, _E.RELEASE): _S.RELEASED,
    (_S.GRANTED, _E.FAIL): _S.FAILED,
    (_S.GRANTED, _E.WITHDRAW): _S.WITHDRAWN,
    (_S.GRANTED, _E.EXPIRE): _S.EXPIRED,
    (_S.HELD, _E.ANSWERED): _S.HELD,
    (_S.HELD, _E.RENEW): _S.HELD,
    (_S.HELD, _E.RELEASE): _S.RELEASED,
    (_S.HELD, _E.FAIL): _S.FAILED,
    (_S.HELD, _E.WITHDRAW): _S.WITHDRAWN,
    (_S.HELD, _E.EXPIRE): _S.EXPIRED,
}
"""All that can happen; the four ends have no edge out of them."""

LIVE_STATES = frozenset({LeaseState.GRANTED, LeaseState.HELD})
ENDED_STATES = frozenset(LeaseState) - LIVE_STATES

# What the reader hears of an ended lease. `unknown` after its own end: only a repeat of that very message gets the
# first answer again.
_ENDED_ANSWER: Mapping[LeaseState, LeaseAnswer] = {
    LeaseState.EXPIRED: "expired",
    LeaseState.WITHDRAWN: "expired",
    LeaseState.RELEASED: "unknown",
    LeaseState.FAILED: "unknown",
}


_WHY: Mapping[LeaseState, LeaseEndedWhy] = {
    LeaseState.RELEASED: "released",
    LeaseState.FAILED: "failed",
    LeaseState.EXPIRED: "expired",
    LeaseState.WITHDRAWN: "withdrawn",
}


class LeaseError(ValueError):
    """The engine asked for what no lease can do; nothing was changed."""


def advance(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """The state after an event.

    Raises:
        LeaseError: the state knows no such event.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise LeaseError(f"a lease that is {state.value} cannot be moved by {event.value}") from None


@dataclass(slots=True)
class Lease:
    """A live lease. `blocks` are ids per KV group in the order of the prompt."""

    lease_id: int
    epoch: int
    prompt_digest: bytes
    blocks: tuple[tuple[int, ...], ...]
    state: LeaseState
    deadline: float  # seconds of the driver's clock
    taken: bool = False  # a reader has renewed it


@dataclass(slots=True, frozen=True)
class EndedLease:
    """What is remembered of a lease, for a bounded while."""

    epoch: int
    prompt_digest: bytes
    state: LeaseState
    forget_at: float


@dataclass(slots=True, frozen=True)
class Lookup:
    """Answer to a read: `blocks` is empty unless `answer` is ``held``."""

    answer: LeaseAnswer
    blocks: tuple[tuple[int, ...], ...] = ()


class LeaseTable:
    """All leases of one engine incarnation. See the module's text for the rules.

    Args:
        incarnation: of this engine; a lease named with another is ``unknown``.
        epoch: of the KV memory now.
        limits: `lease_s`, `answer_s`, `leases`, `ended_lease_s`, `ended_leases` and `reply_memory` are used.
    """

    def __init__(self, *, incarnation: bytes, epoch: int, limits: Limits) -> None:
        self._incarnation = incarnation
        self._epoch = epoch
        self._limits = limits
        self._live: dict[int, Lease] = {}
        self._ended: OrderedDict[int, EndedLease] = OrderedDict()
        self._replies: OrderedDict[tuple[bytes, int, LeaseRef], LeaseAnswer] = OrderedDict()
        self._outbox: list[LeaseEnded] = []
        self._taken: list[LeaseTaken] = []
        self._last_id = -1
        self.granted = 0
        self.ended: dict[str, int] = {state.value: 0 for state in ENDED_STATES}

    # ---- by the engine -------------------------------------------------------------------------------------------

    def grant(self, grant: GrantLease, now: float) -> None:
        """Keep the blocks for a reader that has not heard of them yet.

        Raises:
            LeaseError: the id was used before, the epoch is not the current one, the groups differ in length, or the
                table is full.
        """
        if grant.lease_id <= self._last_id:
            raise LeaseError(f"lease_id: {grant.lease_id} is not above the last one, {self._last_id}")
        if grant.epoch != self._epoch:
            raise LeaseError(f"epoch: {grant.epoch} is not the current one, {self._epoch}")
        if not grant.blocks or len({len(group) for group in grant.blocks}) != 1 or not grant.blocks[0]:
            raise LeaseError(f"blocks: lengths {[len(g) for g in grant.blocks]}; each group needs as many, at least 1")
        if len(self._live) >= self._limits.leases:
            raise LeaseError(f"leases: {len(self._live)} are live, at most {self._limits.leases} are accepted")
        self._last_id = grant.lease_id
        self.granted += 1
        self._live[grant.lease_id] = Lease(
            lease_id=grant.lease_id,
            epoch=grant.epoch,
            prompt_digest=grant.prompt_digest,
            blocks=grant.blocks,
            state=LeaseState.GRANTED,
            deadline=now + self._limits.answer_s,
        )

    def answered(self, lease_id: int, delivered: bool, now: float) -> None:
        """The prefill answer was written, which starts the lease, or could not be, which ends it.

        No effect on a lease that has ended: the reader may have been faster than this word.
        """
        lease = self._live.get(lease_id)
        if lease is None:
            return
        if delivered:
            self._extend(lease, LeaseEvent.ANSWERED, now)
        else:
            self._end(lease, LeaseEvent.WITHDRAW, now)

    def withdraw(self, lease_id: int, now: float) -> bool:
        """End a lease from the owner's side. False when it has ended already or was never granted."""
        lease = self._live.get(lease_id)
        if lease is None:
            return False
        self._end(lease, LeaseEvent.WITHDRAW, now)
        return True

    def withdraw_all(self, now: float) -> None:
        """End every live lease from the owner's side."""
        for lease in tuple(self._live.values()):
            self._end(lease, LeaseEvent.WITHDRAW, now)

    def raise_epoch(self, epoch: int, now: float) -> None:
        """KV memory was registered anew or made invalid: leases of older epochs are void from now on.

        Raises:
            LeaseError: the epoch is not above the current one.
        """
        if epoch <= self._epoch:
            raise LeaseError(f"epoch: {epoch} is not above the current one, {self._epoch}")
        self.withdraw_all(now)
        self._epoch = epoch

    # ---- by the reader -------------------------------------------------------------------------------------------

    def renew(self, ref: LeaseRef, now: float) -> LeaseAnswer:
        """Keep a lease alive for another full duration from now; never shortens it."""
        lease = self._find(ref)
        if lease is None:
            return self._answer_of_ended(ref)
        self._extend(lease, LeaseEvent.RENEW, now)
        if not lease.taken:
            lease.taken = True
            self._taken.append(LeaseTaken(lease_id=lease.lease_id))
        return "held"

    def release(self, ref: LeaseRef, reader: bytes, message_id: int, now: float) -> LeaseAnswer:
        """All has been copied to the reader. ``held``: the lease was live until this message, and ends with it.

        A repeat by the same reader incarnation with the same message id and lease gets the first answer again.
        """
        key = (reader, message_id, ref)
        known = self._replies.get(key)
        if known is not None:
            return known
        lease = self._find(ref)
        if lease is None:
            return self._answer_of_ended(ref)
        self._end(lease, LeaseEvent.RELEASE, now)
        self._remember_reply(key, "held")
        return "held"

    def failed(self, ref: LeaseRef, now: float) -> LeaseAnswer:
        """The reader gives the lease up. ``held``: it was live, and ends with this message."""
        lease = self._find(ref)
        if lease is None:
            return self._answer_of_ended(ref)
        self._end(lease, LeaseEvent.FAIL, now)
        return "held"

    def lookup(self, ref: LeaseRef) -> Lookup:
        """The blocks of a live lease, for the data plane. Changes nothing."""
        lease = self._find(ref)
        return Lookup(self._answer_of_ended(ref)) if lease is None else Lookup("held", lease.blocks)

    # ---- by time -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[LeaseEnded]:
        """End what has expired by `now`, forget what has been remembered long enough; return `take_ended()`."""
        for lease in tuple(self._live.values()):
            if lease.deadline <= now:
                self._end(lease, LeaseEvent.EXPIRE, now)
        while self._ended and next(iter(self._ended.values())).forget_at <= now:
            self._ended.popitem(last=False)
        return self.take_ended()

    def next_expiry(self) -> float | None:
        """The earliest deadline of a live lease."""
        return min((lease.deadline for lease in self._live.values()), default=None)

    def take_ended(self) -> list[LeaseEnded]:
        """The ends since the last call, each exactly once: drop the references of each."""
        ended, self._outbox = self._outbox, []
        return ended

    def take_taken(self) -> list[LeaseTaken]:
        """The leases that were renewed for the first time since the last call."""
        taken, self._taken = self._taken, []
        return taken

    # ---- what it holds -------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epoch

    def live(self) -> int:
        """Leases that keep blocks."""
        return len(self._live)

    def state_of(self, lease_id: int) -> LeaseState | None:
        """The state of a lease; `None` when it is not known (any more)."""
        if lease_id in self._live:
            return self._live[lease_id].state
        ended = self._ended.get(lease_id)
        return None if ended is None else ended.state

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every lease is in exactly one place and every cap holds."""
        ended_count = sum(self.ended.values())
        faults = []
        if self.granted != len(self._live) + ended_count:
            faults.append("granted is not live + ended")
        if any(lease.state not in LIVE_STATES for lease in self._live.values()):
            faults.append("an ended lease is live")
        if any(lease.epoch != self._epoch for lease in self._live.values()):
            faults.append("a lease of another epoch is live")
        if self._live.keys() & self._ended.keys():
            faults.append("a lease is live and ended")
        if any(entry.state not in ENDED_STATES for entry in self._ended.values()):
            faults.append("a live lease is remembered as ended")
        if len({end.lease_id for end in self._outbox}) != len(self._outbox):
            faults.append("a lease ended twice")
        if self._live.keys() & {end.lease_id for end in self._outbox}:
            faults.append("a live lease is reported as ended")
        caps = ((self._live, "leases"), (self._ended, "ended_leases"), (self._replies, "reply_memory"))
        faults += [f"{cap} is exceeded" for held, cap in caps if len(held) > getattr(self._limits, cap)]
        if faults:
            raise IntegrityError(f"{'; '.join(faults)}: {self!r}")

    def __repr__(self) -> str:
        live = ", ".join(f"{lease.lease_id}={lease.state.value}@{lease.deadline:.3f}" for lease in self._live.values())
        ends = ", ".join(f"{why}={count}" for why, count in sorted(self.ended.items()))
        return (
            f"LeaseTable(epoch={self._epoch}, granted={self.granted}, live=[{live}], {ends}, "
            f"remembered={len(self._ended)}, replies={len(self._replies)}, untold={len(self._outbox)})"
        )

    # ---- inside --------------------------------------------------------------------------------------------------

    def _find(self, ref: LeaseRef) -> Lease | None:
        lease = self._live.get(ref.lease_id)
        if lease is None or not self._agrees(ref, lease):
            return None
        return lease

    def _agrees(self, ref: LeaseRef, lease: Lease | EndedLease) -> bool:
        return (
            ref.incarnation == self._incarnation
            and ref.epoch == lease.epoch
            and ref.prompt_digest == lease.prompt_digest
        )

    def _answer_of_ended(self, ref: LeaseRef) -> LeaseAnswer:
        ended = self._ended.get(ref.lease_id)
        if ended is None or not self._agrees(ref, ended):
            return "unknown"
        return _ENDED_ANSWER[ended.state]

    def _extend(self, lease: Lease, event: LeaseEvent, now: float) -> None:
        starts = lease.state is LeaseState.GRANTED
        lease.state = advance(lease.state, event)
        extended = now + self._limits.lease_s
        # The time given to the answer is no part of the lease: the start replaces it, a renewal only adds.
        lease.deadline = extended if starts else max(lease.deadline, extended)

    def _end(self, lease: Lease, event: LeaseEvent, now: float) -> None:
        state = advance(lease.state, event)
        del self._live[lease.lease_id]
        self.ended[state.value] += 1
        self._outbox.append(LeaseEnded(lease_id=lease.lease_id, why=_WHY[state]))
        forget_at = now + self._limits.ended_lease_s
        self._ended[lease.lease_id] = EndedLease(lease.epoch, lease.prompt_digest, state, forget_at)
        while len(self._ended) > self._limits.ended_leases:
            self._ended.popitem(last=False)

    def _remember_reply(self, key: tuple[bytes, int, LeaseRef], answer: LeaseAnswer) -> None:
        self._replies[key] = answer
        while len(self._replies) > self._limits.reply_memory:
            self._replies.popitem(last=False)
