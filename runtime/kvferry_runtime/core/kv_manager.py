"""The KV manager: block tables of sequences, leases and pulls, over the block pool and the prefix cache.

Every reference on a block belongs to one of four owners: a sequence's table, a lease, a pull (a transfer that writes
the block), or a pending copy (its source). ``check_integrity`` counts them all.
"""

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from kvferry_runtime.core.block_pool import BlockPool
from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.integrity import IntegrityError, check_block_accounts, check_live_accounts
from kvferry_runtime.core.messages import LegKey
from kvferry_runtime.core.plan import BlockCopy
from kvferry_runtime.core.prefix_cache import CachedBlock, PrefixCache
from kvferry_runtime.core.sequence import Sequence


class KVManager:
    """Gives blocks to sequences and takes them back. It decides nothing about order."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.cache = PrefixCache(config.limits.state_buffer)
        self.pool = BlockPool(config.blocks, self.cache.remove)
        self.leases: dict[int, tuple[int, ...]] = {}
        self._handed: set[int] = set()  # of them, those on the KV of legs that left: they take no block that is new
        self.pulls: dict[LegKey, tuple[int, ...]] = {}
        self._copies: dict[int, int] = {}  # target -> source; each holds a reference on its source

    # ---- sequences ----

    def lookup(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's prefix; never the one that holds its last token."""
        if not self.config.prefix_caching:
            return []
        size, key = self.config.block_size, self.config.hash_key
        return self.cache.match(
            (sequence.block_name(index, size, key) for index in itertools.count()),
            lambda index: sequence.block_tokens(index, size),
            sequence.leg.extras,
            (len(sequence.tokens) - 1) // size,
        )

    def covers(self, hits: Ordered[int], tokens: int) -> bool:
        """Whether there are hits and they leave at most one block of so many leading tokens to compute."""
        return bool(hits) and tokens - len(hits) * self.config.block_size <= self.config.block_size

    def can_admit(self, sequence: Sequence, hits: Ordered[int], spare: int) -> bool:
        """Whether the whole sequence fits, with `spare` blocks left over. Hits that are idle stop being available."""
        need = self.config.blocks_for(len(sequence.tokens)) - len(hits)
        idle = sum(1 for block in hits if self.pool.is_idle(block))
        return self.pool.can_allocate(need + idle + spare)

    def admit(self, sequence: Sequence, hits: Ordered[int]) -> None:
        """Give the sequence the hits and new blocks for the rest of its tokens."""
        self.pool.acquire(hits)
        sequence.table = [*hits, *self.pool.allocate(self.config.blocks_for(len(sequence.tokens)) - len(hits))]
        sequence.computed = len(hits) * self.config.block_size
        sequence.published = len(hits)

    def missing(self, sequence: Sequence) -> int:
        """Blocks that the sequence's tokens need beyond its table."""
        return self.config.blocks_for(len(sequence.tokens)) - len(sequence.table)

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether ``grow`` would succeed now."""
        return self.pool.can_allocate(max(0, self.missing(sequence)))

    def grow(self, sequence: Sequence) -> None:
        """Give the sequence the blocks that its tokens need."""
        missing = self.missing(sequence)
        if missing > 0:
            sequence.table.extend(self.pool.allocate(missing))

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back, the last ones first in the order of eviction."""
        for block in sequence.table:
            source = self._copies.pop(block, None)
            if source is not None:
                self.pool.release((source,))
        self.pool.release(reversed(sequence.table))
        sequence.table = []
        sequence.computed = 0
        sequence.published = 0

    def publish_computed(self, sequence: Sequence) -> None:
        """Put the blocks that are full of computed tokens into the prefix cache."""
        size = self.config.block_size
        full = sequence.computed // size
        if not self.config.prefix_caching or full <= sequence.published:
            return
        for index in range(sequence.published, full):
            name = sequence.block_name(index, size, self.config.hash_key)
            parent = sequence.hashes[index - 1] if index else None
            tokens = tuple(sequence.block_tokens(index, size))
            block = sequence.table[index]
            if self.cache.publish(CachedBlock(name, parent, tokens, sequence.leg.extras, block)):
                self.pool.mark_cached(block)
        sequence.published = full

    def can_fork(self, root: Sequence) -> bool:
        """Whether a choice can share the root's full blocks and get a copy of the partial last one."""
        return self.pool.can_allocate(1 if root.computed % self.config.block_size else 0)

    def fork(self, root: Sequence, child: Sequence) -> None:
        """Let `child`, whose tokens begin with the root's computed ones, start where the root is."""
        size = self.config.block_size
        full, partial = divmod(root.computed, size)
        shared = root.table[:full]
        self.pool.acquire(shared)
        child.table = list(shared)
        child.hashes = root.hashes[:full]
        child.published = min(root.published, full)
        child.computed = root.computed
        if partial:
            source = root.table[full]
            (target,) = self.pool.allocate(1)
            self.pool.acquire((source,))
            self._copies[target] = source
            child.table.append(target)

    def pending_copies(self) -> tuple[BlockCopy, ...]:
        """Copies that the next step has to do before it computes."""
        return tuple(BlockCopy(source, target) for target, source in self._copies.items())

    def copied(self, copies: Iterable[BlockCopy]) -> None:
        """These copies were done: let their sources go."""
        for copy in copies:
            if self._copies.pop(copy.target, None) == copy.source:
                self.pool.release((copy.source,))

    # ---- leases ----

    def to_lease(self, sequence: Sequence, lease_id: int) -> tuple[int, ...]:
        """Move the sequence's references to a lease; the sequence has no block afterwards."""
        blocks = tuple(sequence.table)
        self.leases[lease_id] = blocks
        sequence.table = []
        sequence.computed = 0
        sequence.published = 0
        return blocks

    def hand_over(self, blocks: tuple[int, ...], lease_id: int) -> None:
        """Put a lease on blocks of a leg that leaves, before it drops its own references."""
        self.pool.acquire(blocks)
        self.leases[lease_id] = blocks
        self._handed.add(lease_id)

    def end_lease(self, lease_id: int) -> bool:
        """Drop exactly the lease's references; ``False`` for a lease that is not known (or ended before)."""
        blocks = self.leases.pop(lease_id, None)
        self._handed.discard(lease_id)
        if blocks is None:
            return False
        self.pool.release(reversed(blocks))
        return True

    @property
    def leased(self) -> int:
        """References that count against the leases' share: those of prefill legs."""
        return sum(len(blocks) for lease_id, blocks in self.leases.items() if lease_id not in self._handed)

    # ---- pulls ----

    def begin_pull(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Give the sequence blocks that a transfer will write: it and the pull hold a reference each."""
        blocks = self.pool.allocate(count)
        self.pool.acquire(blocks)
        self.pool.quarantine(blocks)
        self.pulls[sequence.leg.key] = tuple(blocks)
        sequence.table = blocks
        return tuple(blocks)

    def end_pull(self, key: LegKey) -> bool:
        """The transfer writes no more: drop the pull's references; ``False`` for an unknown pull."""
        blocks = self.pulls.pop(key, None)
        if blocks is None:
            return False
        self.pool.lift(blocks)
        self.pool.release(reversed(blocks))
        return True

    # ---- the cache as a whole ----

    def reset_cache(self) -> None:
        """Unpublish every block; nobody who references one loses it."""
        for block in self.cache.clear():
            self.pool.uncache(block)

    def check_accounts(self, sequences: Iterable[Sequence]) -> None:
        """The part of ``check_integrity`` that takes as long as there are references; ``IdleWalk`` does the rest.

        Raises:
            IntegrityError: an account does not add up; the message prints every term.
        """
        free, idle, cached = self.pool.counts()
        check_live_accounts(
            total=self.pool.total,
            free=free,
            idle_cached=idle,
            refs=self.pool.reference_counts(),
            owners=self._owners(list(sequences)),
        )
        if cached != len(self.cache):
            raise IntegrityError(f"{cached} blocks are marked as cached, the cache names {len(self.cache)}")

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check all accounts.

        Raises:
            IntegrityError: an account does not add up; the message prints every term.
        """
        live = list(sequences)
        check_block_accounts(
            total=self.pool.total,
            free=self.pool.free_ids(),
            idle_cached=self.pool.idle_ids(),
            refs=self.pool.reference_counts(),
            owners=self._owners(live),
        )
        pulled = set(itertools.chain.from_iterable(self.pulls.values()))
        if self.pool.quarantined_ids() != pulled:
            raise IntegrityError(f"quarantined {sorted(self.pool.quarantined_ids())}, pulls write {sorted(pulled)}")
        named = self.cache.blocks()
        if self.pool.cached_ids() != named.keys():
            raise IntegrityError(f"pool says cached {sorted(self.pool.cached_ids())}, cache names {sorted(named)}")
        lost = [block for block in named if not self.cache.names_rightly(block)]
        if lost or len(named) != len(self.cache):
            raise IntegrityError(f"cache has {len(named)} blocks under {len(self.cache)} names; not found: {lost}")
        tables = set(itertools.chain.from_iterable(sequence.table for sequence in live))
        if not self._copies.keys() <= tables:
            raise IntegrityError(f"copies into {sorted(self._copies)}, which no sequence owns")
        for sequence in live:
            if len(sequence.table) * self.config.block_size < sequence.computed:
                raise IntegrityError(f"{sequence!r} has computed more than its blocks hold")

    def _owners(self, live: list[Sequence]) -> dict[str, Iterable[int]]:
        """Whoever holds references, and the blocks that it holds, once for each."""
        return {
            "sequences": itertools.chain.from_iterable(sequence.table for sequence in live),
            "leases": itertools.chain.from_iterable(self.leases.values()),
            "pulls": itertools.chain.from_iterable(self.pulls.values()),
            "copies": self._copies.values(),
        }
