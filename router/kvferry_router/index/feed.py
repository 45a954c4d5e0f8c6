"""How one pod's state stream becomes index entries: subscribe, buffer, take a snapshot, apply what is later.

Pure: messages and snapshots in, effects out. A gap in the numbers, another incarnation or a full buffer joins again;
until the join is done the pod has no entries, which costs hits and nothing else. Silence makes the entries unused
(``fresh``), not the pod dead.
"""

import enum
from collections import deque
from dataclasses import dataclass

from kvferry_wire.limits import Limits
from kvferry_wire.state import BlocksRemoved, BlocksStored, Cleared, Load, Snapshot, StateEvent, StateMessage


class FeedState(enum.Enum):
    WAITING = "waiting"  # subscribed; the first message shows that the subscription works
    JOINING = "joining"  # a snapshot is on its way; messages are buffered
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Fetch the pod's snapshot; answer with ``snapshot`` or ``snapshot_failed``, with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Replace:
    """The pod has exactly these blocks."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Store:
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Remove:
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """The pod's entries are of no use."""


FeedEffect = FetchSnapshot | Replace | Store | Remove | Forget

# A snapshot is asked for without a message after this long, and again this long after a failure.
_RETRY_S = 1.0


class StateFeed:
    """The state of one pod's stream.

    Attributes:
        incarnation: whose entries are in the index, or were last; ``None`` before the first.
        load: the newest one.
        rejoins: joins begun after the first, by reason.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.state = FeedState.WAITING
        self.incarnation: bytes | None = None
        self.load: Load | None = None
        self.rejoins = {"gap": 0, "incarnation": 0, "overflow": 0}
        self._sequence = 0
        self._buffer: deque[StateMessage] = deque()
        self._number = 0  # of the snapshot asked for last
        self._retry_at = 0.0
        self._heard_at: float | None = None
        self._fetching = False

    def __repr__(self) -> str:
        return f"StateFeed({self.state.value}, sequence={self._sequence}, buffered={len(self._buffer)})"

    def start(self, now: float) -> None:
        """The subscription is being made."""
        self._retry_at = now + _RETRY_S

    def restart(self, now: float) -> list[FeedEffect]:
        """The pod is known to be another incarnation: its entries are void, the next message joins."""
        self.state = FeedState.WAITING
        self.load = None
        self._buffer.clear()
        self._fetching = False
        self._number += 1  # a snapshot still on its way is of no use
        self._retry_at = now + _RETRY_S
        return [Forget()]

    def fresh(self, now: float) -> bool:
        """Whether the entries may be used: joined, and heard of within the silence limit."""
        heard = self._heard_at
        return self.state is FeedState.LIVE and heard is not None and now - heard < self._limits.state_silence_s

    def message(self, message: StateMessage, now: float) -> list[FeedEffect]:
        """Take one message of the stream."""
        self._heard_at = now
        if isinstance(message.event, Load):
            self.load = message.event
        if self.state is FeedState.LIVE:
            if message.incarnation != self.incarnation:
                return self._rejoin("incarnation", message)
            if message.sequence <= self._sequence:
                return []  # already in the snapshot
            if message.sequence != self._sequence + 1:
                return self._rejoin("gap", message)
            return self._apply(message)
        return self._buffer_message(message)

    def snapshot(self, number: int, snapshot: Snapshot, now: float) -> list[FeedEffect]:
        """Take the snapshot that ``FetchSnapshot(number)`` asked for; one asked for earlier is ignored."""
        if number != self._number or self.state is not FeedState.JOINING:
            return []
        self._fetching = False
        self._heard_at = now
        buffered = [message for message in self._buffer if message.incarnation == snapshot.incarnation]
        if self._buffer and self._buffer[-1].incarnation != snapshot.incarnation:
            # Either is of a pod that has restarted since: what comes next will tell.
            self._buffer.clear()
            self._retry_at = now + _RETRY_S
            return []
        self._buffer.clear()
        self.state = FeedState.LIVE
        self.incarnation = snapshot.incarnation
        self._sequence = snapshot.sequence
        self.load = snapshot.load
        effects: list[FeedEffect] = [Replace(snapshot.hashes)]
        for message in buffered:
            effects += self.message(message, now)
        return effects

    def snapshot_failed(self, number: int, now: float) -> list[FeedEffect]:
        """The snapshot could not be had; it is asked for again by a later tick."""
        if number == self._number and self._fetching:
            self._fetching = False
            self._retry_at = now + _RETRY_S
        return []

    def tick(self, now: float) -> list[FeedEffect]:
        """Time has passed."""
        if self.state is not FeedState.LIVE and not self._fetching and now >= self._retry_at:
            return self._fetch()
        return []

    def _fetch(self) -> list[FeedEffect]:
        self.state = FeedState.JOINING
        self._fetching = True
        self._number += 1
        return [FetchSnapshot(self._number)]

    def _buffer_message(self, message: StateMessage) -> list[FeedEffect]:
        if self._buffer and (
            self._buffer[-1].incarnation != message.incarnation or message.sequence != self._buffer[-1].sequence + 1
        ):
            self._buffer.clear()  # what lies before the break can no longer be joined to what follows
        if len(self._buffer) >= self._limits.state_buffer:
            self._buffer.clear()
            self.rejoins["overflow"] += 1
            self._buffer.append(message)
            return self._fetch()
        self._buffer.append(message)
        return [] if self._fetching else self._fetch()

    def _rejoin(self, reason: str, message: StateMessage) -> list[FeedEffect]:
        self.rejoins[reason] += 1
        self._buffer.clear()
        self._buffer.append(message)
        return [Forget(), *self._fetch()]

    def _apply(self, message: StateMessage) -> list[FeedEffect]:
        self._sequence = message.sequence
        return _effects_of(message.event)


def _effects_of(event: StateEvent) -> list[FeedEffect]:
    match event:
        case BlocksStored():
            return [Store(event.hashes)]
        case BlocksRemoved():
            return [Remove(event.hashes)]
        case Cleared():
            return [Replace(())]
        case Load():
            return []
