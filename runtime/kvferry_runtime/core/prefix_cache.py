"""The prefix cache: which block holds which content, and what the state stream says about it.

A block is named by its keyed chained hash (``kvferry_wire.hashing``). A hit is believed only when the block's token
ids, its key extras and its parent's hash are equal too, so that a collision of hashes cannot serve foreign KV.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvferry_wire.state import BlocksRemoved, BlocksStored, Cleared, StateEvent


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One published block: its name and what the name stands for."""

    hash: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    extras: bytes
    block: int


class PrefixCache:
    """Content -> block, and the events of its changes.

    Args:
        event_cap: events kept for ``drain_events``; beyond it they are replaced by ``Cleared`` and one event per
            block that is in the cache, which says the same to a reader.
    """

    def __init__(self, event_cap: int) -> None:
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._events: list[_Stored | _Removed | Cleared] = []
        self._event_cap = event_cap
        self.collisions = 0  # hits that were not believed

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def match(
        self, chain: Iterator[bytes], tokens_of: Callable[[int], Sequence[int]], extras: bytes, limit: int
    ) -> list[int]:
        """The blocks of the longest cached prefix, at most `limit` of them. Changes nothing but a counter.

        Args:
            chain: the sequence's block hashes, first to last, made as they are asked for.
            tokens_of: token ids of the i-th block of the sequence.
            extras: ``KeyExtras.canonical()`` of the sequence.
            limit: blocks to look for.
        """
        hits: list[int] = []
        parent: bytes | None = None
        while len(hits) < limit:
            name = next(chain)
            entry = self._by_hash.get(name)
            if entry is None:
                break
            if entry.parent != parent or entry.tokens != tuple(tokens_of(len(hits))) or entry.extras != extras:
                self.collisions += 1
                break
            hits.append(entry.block)
            parent = name
        return hits

    def publish(self, entry: CachedBlock) -> bool:
        """Name a block's content; ``False`` when that name stands for another block already, which stays."""
        if entry.hash in self._by_hash or entry.block in self._by_block:
            return False
        self._by_hash[entry.hash] = entry
        self._by_block[entry.block] = entry
        self._note_stored(entry)
        return True

    def remove(self, block: int) -> None:
        """Forget a block: its memory gets a new owner."""
        entry = self._by_block.pop(block)
        del self._by_hash[entry.hash]
        last = self._events[-1] if self._events else None
        if isinstance(last, _Removed):
            last.hashes.append(entry.hash)
        else:
            self._note(_Removed([entry.hash]))

    def clear(self) -> list[int]:
        """Forget all; return the blocks that were known."""
        blocks = list(self._by_block)
        self._by_hash.clear()
        self._by_block.clear()
        self._events = [Cleared()]
        return blocks

    def hashes(self) -> tuple[bytes, ...]:
        """The names of all blocks in the cache, in the order of their publication."""
        return tuple(self._by_hash)

    def drain_events(self) -> list[StateEvent]:
        """What changed since the last call."""
        events, self._events = self._events, []
        return [event if isinstance(event, Cleared) else event.message() for event in events]

    def names_rightly(self, block: int) -> bool:
        """Whether the block's entry is found by its own name."""
        entry = self._by_block.get(block)
        return entry is not None and self._by_hash.get(entry.hash) is entry

    def blocks(self) -> dict[int, CachedBlock]:
        """All entries by block id."""
        return dict(self._by_block)

    def _note_stored(self, entry: CachedBlock) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, _Stored) and last.hashes[-1] == entry.parent:
            last.hashes.append(entry.hash)
        else:
            self._note(_Stored([entry.hash], entry.parent))

    def _note(self, event: "_Stored | _Removed") -> None:
        self._events.append(event)
        if len(self._events) > self._event_cap:
            self._events = [Cleared(), *(_Stored([entry.hash], entry.parent) for entry in self._by_hash.values())]


@dataclass(slots=True)
class _Stored:
    hashes: list[bytes]
    parent: bytes | None

    def message(self) -> BlocksStored:
        return BlocksStored(hashes=tuple(self.hashes), parent=self.parent)


@dataclass(slots=True)
class _Removed:
    hashes: list[bytes]

    def message(self) -> BlocksRemoved:
        return BlocksRemoved(hashes=tuple(self.hashes))
