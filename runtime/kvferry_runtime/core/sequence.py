"""A sequence: tokens that share one block table, and the states it goes through.

A leg starts as one sequence. With several choices to make it is a *root* that computes the prompt once for all of
them; at the prompt's end the root becomes the first choice and the others fork off it.

All transitions are in ``TRANSITIONS``; an event that is not listed for a state raises and changes nothing.
"""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry_wire.hashing import block_hash

if TYPE_CHECKING:
    from kvferry_runtime.core.leg import LiveLeg


class State(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"  # holds no block
    REMOTE = "remote"  # waits aside for room to pull its KV into
    PULLING = "pulling"  # a transfer writes its blocks
    READY = "ready"  # holds valid ferried blocks, waits for its turn
    RUNNING = "running"  # in the running batch
    ENDED = "ended"


class Event(enum.Enum):
    """What happens to a sequence."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    START_PULL = "start pull"
    PULLED = "pulled"
    PULL_FAILED = "pull failed"
    GO_LOCAL = "go local"  # the KV is not pulled: cached here, or unusable
    RECLAIM = "reclaim"  # its ferried blocks are needed by a running sequence
    END = "end"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.RUNNING,
    (State.READY, Event.ADMIT): State.RUNNING,
    (State.RUNNING, Event.PREEMPT): State.WAITING,
    (State.READY, Event.RECLAIM): State.WAITING,
    (State.REMOTE, Event.START_PULL): State.PULLING,
    (State.REMOTE, Event.GO_LOCAL): State.WAITING,
    (State.PULLING, Event.PULLED): State.READY,
    (State.PULLING, Event.PULL_FAILED): State.WAITING,
    (State.WAITING, Event.END): State.ENDED,
    (State.REMOTE, Event.END): State.ENDED,
    (State.PULLING, Event.END): State.ENDED,
    (State.READY, Event.END): State.ENDED,
    (State.RUNNING, Event.END): State.ENDED,
}


class IllegalTransitionError(RuntimeError):
    """An event that a sequence's state does not allow."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, how many of them are in KV, and the blocks that hold them.

    Invariants: ``computed < len(tokens)`` outside a step, but for a root whose whole prompt was ferried;
    ``len(table) * block_size >= computed``; ``published`` counts the leading blocks that were offered to the prefix
    cache; ``hashes`` are those of the leading full blocks, as far as they were needed.
    """

    number: int
    leg: "LiveLeg"
    choice: int | None  # None: a root, which stands for all choices of its leg
    tokens: list[int]
    state: State = State.WAITING
    computed: int = 0
    table: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    published: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """First come, first served: the leg's arrival, then the choice."""
        return self.leg.arrival, -1 if self.choice is None else self.choice

    def apply(self, event: Event) -> None:
        """Go to the next state.

        Raises:
            IllegalTransitionError: naming sequence, state and event; nothing changes.
        """
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise IllegalTransitionError(f"sequence {self.number} is {self.state.value}: {event.value} is not possible")
        self.state = following

    def block_tokens(self, index: int, block_size: int) -> list[int]:
        """Token ids of the index-th full block."""
        return self.tokens[index * block_size : (index + 1) * block_size]

    def block_name(self, index: int, block_size: int, key: bytes) -> bytes:
        """Hash of the index-th full block; computed once."""
        while len(self.hashes) <= index:
            at = len(self.hashes)
            parent = self.hashes[-1] if self.hashes else None
            self.hashes.append(block_hash(key, parent, self.block_tokens(at, block_size), self.leg.extras))
        return self.hashes[index]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.number}, {self.leg.key.internal_id}#{self.leg.key.attempt}, choice={self.choice}, "
            f"{self.state.value}, computed={self.computed}/{len(self.tokens)}, blocks={self.table})"
        )
