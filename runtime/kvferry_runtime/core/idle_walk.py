"""Walks the blocks of an idle engine in slices, so that no turn of its loop takes as long as there are blocks.

The accounts of live references are checked whole when an engine has become idle (``KVManager.check_accounts``). What
nobody references is most of a large pool: each block of it has to be in exactly one place, and each cached one to be
found by its name. As long as no block changes hands, a slice of it is looked at per idle turn.
"""

from kvferry_runtime.core.integrity import IntegrityError
from kvferry_runtime.core.kv_manager import KVManager

BLOCKS_A_TURN = 4096  # some milliseconds


class IdleWalk:
    """One walk after the other; each begins anew where a block has changed hands since its last slice."""

    def __init__(self, kv: KVManager, blocks_a_turn: int = BLOCKS_A_TURN) -> None:
        self._kv = kv
        self._blocks_a_turn = blocks_a_turn
        self._changes = -1  # of the pool, when the walk began
        self._free_at = 0  # of the free list, how much has been walked
        self._block = 1  # the next to be placed, once all of the free list has been walked
        self._is_free = bytearray()

    def turn(self) -> bool:
        """Walk one slice; whether all blocks have been walked since one has changed hands.

        Raises:
            IntegrityError: a block is in no place or in two, unknown, or not found by its name.
        """
        pool = self._kv.pool
        if self._changes != pool.changes:
            self._changes = pool.changes
            self._free_at, self._block = 0, 1
            self._is_free = bytearray(pool.total + 1)
        found = pool.free_slice(self._free_at, self._blocks_a_turn)
        if found:
            self._walk_free(found)
            self._free_at += len(found)
        else:
            last = min(self._block + self._blocks_a_turn, pool.total + 1)
            for block in range(self._block, last):
                self._place(block)
            self._block = last
        return self._block > pool.total

    def _walk_free(self, found: list[int]) -> None:
        pool, is_free = self._kv.pool, self._is_free
        for block in found:
            if not 1 <= block <= pool.total:
                raise IntegrityError(f"the free list has block {block}; there are 1 to {pool.total}")
            if is_free[block]:
                raise IntegrityError(f"block {block} is on the free list twice")
            is_free[block] = 1

    def _place(self, block: int) -> None:
        pool = self._kv.pool
        idle, references = pool.is_idle(block), pool.references(block)
        if self._is_free[block] + idle + (references > 0) != 1:
            raise IntegrityError(
                f"block {block}: free {bool(self._is_free[block])}, idle {idle}, references {references}; one is right"
            )
        cached = pool.is_cached(block)
        if cached and (self._is_free[block] or not self._kv.cache.names_rightly(block)):
            raise IntegrityError(f"block {block} is marked as cached, and free or not found by its name")
        if not cached and (idle or block in self._kv.cache):
            raise IntegrityError(f"block {block} is idle or named in the cache, and not marked as cached")
