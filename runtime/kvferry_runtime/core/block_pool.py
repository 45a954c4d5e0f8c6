"""The block pool: who may use which KV block.

A usable block is in exactly one of three places: on the free list, idle in the prefix cache (its content may be asked
for again; nobody references it), or referenced. Block 0 is the null block and never leaves the pool. Questions
(``can_allocate``) and acts (``allocate``) are apart, so that the callers' policy reads as policy.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvferry_runtime.core.integrity import IntegrityError

NULL_BLOCK = 0


class BlockPool:
    """Free list, reference counts, and the order in which idle cached blocks are evicted (least recently used first).

    Args:
        blocks: blocks of the KV memory, the null block included.
        on_evict: called with the id of a cached block just before the block is given to a new owner.
    """

    def __init__(self, blocks: int, on_evict: Callable[[int], None]) -> None:
        self.total = blocks - 1
        # A stack: recently used memory is used again first. The lowest id is on top at the start.
        self._free = list(range(blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._cached: set[int] = set()
        self._refs: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self._on_evict = on_evict
        self.changes = 0  # calls after which a block may be in another place, or known by another content

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` could give: free ones, and cached ones without a reference."""
        return len(self._free) + len(self._idle)

    def can_allocate(self, count: int) -> bool:
        """Whether ``allocate(count)`` would succeed now."""
        return count <= self.available

    def is_idle(self, block: int) -> bool:
        """Whether a block is cached and nobody references it."""
        return block in self._idle

    def references(self, block: int) -> int:
        """References on a block."""
        return self._refs.get(block, 0)

    def allocate(self, count: int) -> list[int]:
        """Give blocks with one reference each: free ones first, then the least recently used cached ones.

        Raises:
            IntegrityError: fewer are available; nothing changes. Ask ``can_allocate`` first.
        """
        if not self.can_allocate(count):
            raise IntegrityError(f"allocate({count}): free={len(self._free)} cached={len(self._idle)}")
        self.changes += 1
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._on_evict(block)
                self._cached.discard(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take one more reference on blocks that are referenced or idle in the cache."""
        self.changes += 1
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self._refs[block] = 1
            elif block in self._refs:
                self._refs[block] += 1
            else:
                raise IntegrityError(f"acquire: block {block} is free or unknown")

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference on each block, in order; the first of them are evicted first, if they are cached.

        Raises:
            IntegrityError: a block without a reference, or the last reference on a quarantined block.
        """
        self.changes += 1
        for block in blocks:
            references = self._refs.get(block, 0)
            if references == 0:
                raise IntegrityError(f"release: block {block} has no reference")
            if references > 1:
                self._refs[block] = references - 1
                continue
            if block in self._quarantined:
                raise IntegrityError(f"release: block {block} is quarantined, a transfer may still write it")
            del self._refs[block]
            if block in self._cached:
                self._idle[block] = None
            else:
                self._free.append(block)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Mark referenced blocks as written by a transfer: their last reference cannot be dropped until ``lift``."""
        for block in blocks:
            if block not in self._refs or block in self._quarantined:
                raise IntegrityError(f"quarantine: block {block} is not referenced, or quarantined already")
            self._quarantined.add(block)

    def lift(self, blocks: Iterable[int]) -> None:
        """The transfer writes no more."""
        for block in blocks:
            if block not in self._quarantined:
                raise IntegrityError(f"lift: block {block} is not quarantined")
            self._quarantined.remove(block)

    def mark_cached(self, block: int) -> None:
        """A referenced block's content can be asked for again: keep it when its last reference goes."""
        if block not in self._refs or block in self._quarantined:
            raise IntegrityError(f"mark_cached: block {block} is not referenced, or quarantined")
        self.changes += 1
        self._cached.add(block)

    def uncache(self, block: int) -> None:
        """Nobody will ask for the block's content: idle, it becomes free."""
        self.changes += 1
        self._cached.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def free_slice(self, first: int, count: int) -> list[int]:
        """Some of the free list, without a copy of it all."""
        return self._free[first : first + count]

    def is_cached(self, block: int) -> bool:
        """Whether a block is marked as cached, referenced or idle."""
        return block in self._cached

    def counts(self) -> tuple[int, int, int]:
        """Blocks that are free, idle in the cache, and marked as cached."""
        return len(self._free), len(self._idle), len(self._cached)

    def free_ids(self) -> tuple[int, ...]:
        """The free list; its last is given first."""
        return tuple(self._free)

    def idle_ids(self) -> tuple[int, ...]:
        """Cached blocks without a reference; the first is evicted first."""
        return tuple(self._idle)

    def cached_ids(self) -> frozenset[int]:
        """Blocks marked as cached, referenced or idle."""
        return frozenset(self._cached)

    def reference_counts(self) -> dict[int, int]:
        """Referenced blocks and how many references each has."""
        return dict(self._refs)

    def quarantined_ids(self) -> frozenset[int]:
        """Blocks that a transfer may write."""
        return frozenset(self._quarantined)

    def __repr__(self) -> str:
        return (
            f"BlockPool(total={self.total}, free={len(self._free)}, cached={len(self._idle)}, used={len(self._refs)}, "
            f"quarantined={len(self._quarantined)})"
        )
