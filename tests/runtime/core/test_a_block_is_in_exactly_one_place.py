"""The block pool: exact ids, exact eviction order, and the accounts under random use."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry_runtime.core.block_pool import BlockPool
from kvferry_runtime.core.integrity import IntegrityError, check_block_accounts


def make_pool(usable: int = 4) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(usable + 1, evicted.append), evicted


def make_cached(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    for block in blocks:
        pool.mark_cached(block)
    return blocks


def test_blocks_are_given_from_the_lowest_and_never_the_null_block() -> None:
    """A fresh pool gives 1, 2, 3, ...; block 0 is never given."""
    pool, _ = make_pool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) == [4]
    assert not pool.can_allocate(1)


def test_a_released_table_is_given_again_in_its_order() -> None:
    """Blocks released from the last to the first come back first to last, so that runs stay contiguous."""
    pool, _ = make_pool(4)
    table = pool.allocate(3)
    pool.release(reversed(table))
    assert pool.allocate(3) == [1, 2, 3]


def test_free_blocks_go_before_cached_ones_and_cached_ones_in_order_of_release() -> None:
    """Eviction takes the least recently released cached block, and only when no block is free."""
    pool, evicted = make_pool(4)
    cached = make_cached(pool, 3)
    pool.release([2])
    pool.release([3])
    pool.release([1])
    assert pool.idle_ids() == (2, 3, 1)
    assert pool.allocate(1) == [4]
    assert evicted == []
    assert pool.allocate(2) == [2, 3]
    assert evicted == [2, 3]
    assert cached == [1, 2, 3]


def test_a_hit_takes_a_cached_block_out_of_the_order_of_eviction() -> None:
    """An idle block that is referenced again cannot be evicted, and is the last in the order once it is released."""
    pool, evicted = make_pool(2)
    make_cached(pool, 2)
    pool.release([1, 2])
    pool.acquire([1])
    assert pool.allocate(1) == [2]
    assert evicted == [2]
    assert not pool.can_allocate(1)
    pool.release([1])
    assert pool.idle_ids() == (1,)


def test_a_shared_block_is_free_only_after_its_last_reference() -> None:
    """Two owners release once each; one of them twice is an error (B027)."""
    pool, _ = make_pool(2)
    (block,) = pool.allocate(1)
    pool.acquire([block])
    pool.release([block])
    assert pool.references(block) == 1
    pool.release([block])
    with pytest.raises(IntegrityError, match="no reference"):
        pool.release([block])


def test_a_quarantined_block_keeps_its_last_reference_until_the_transfer_ended() -> None:
    """A block that a transfer may write cannot become free, nor be cached."""
    pool, _ = make_pool(2)
    blocks = pool.allocate(1)
    pool.quarantine(blocks)
    with pytest.raises(IntegrityError, match="quarantined"):
        pool.release(blocks)
    with pytest.raises(IntegrityError, match="quarantined"):
        pool.mark_cached(blocks[0])
    pool.lift(blocks)
    pool.release(blocks)
    assert pool.available == 2


def test_asking_too_much_changes_nothing() -> None:
    """``allocate`` beyond what is available raises with the numbers and takes no block."""
    pool, _ = make_pool(2)
    with pytest.raises(IntegrityError, match=r"allocate\(3\): free=2 cached=0"):
        pool.allocate(3)
    assert pool.available == 2


def test_uncaching_an_idle_block_frees_it_and_a_referenced_one_stays() -> None:
    """Unpublishing takes no block away from an owner."""
    pool, _ = make_pool(2)
    make_cached(pool, 2)
    pool.release([1])
    pool.uncache(1)
    pool.uncache(2)
    assert (pool.idle_ids(), pool.free_ids(), pool.references(2)) == ((), (1,), 1)


class PoolMachine(RuleBasedStateMachine):
    """Random owners over a small pool, against a plain model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(9, self.evicted.append)
        self.owners: dict[int, list[int]] = {}
        self.quarantined: set[int] = set()
        self.number = 0

    def own(self, blocks: list[int]) -> None:
        self.number += 1
        self.owners[self.number] = blocks

    @rule(count=st.integers(1, 5))
    def allocate(self, count: int) -> None:
        """New blocks have no other owner."""
        if not self.pool.can_allocate(count):
            with pytest.raises(IntegrityError):
                self.pool.allocate(count)
            return
        before = set(self.pool.reference_counts())
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not before & set(blocks)
        assert 0 not in blocks
        self.own(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = self.owners[data.draw(st.sampled_from(sorted(self.owners)))]
        self.pool.acquire(blocks)
        self.own(list(blocks))

    @precondition(lambda self: self.pool.idle_ids())
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.pool.idle_ids()))
        self.pool.acquire([block])
        self.own([block])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        blocks = self.owners[data.draw(st.sampled_from(sorted(self.owners)))]
        block = data.draw(st.sampled_from(blocks))
        if block not in self.quarantined:
            self.pool.mark_cached(block)

    @rule(block=st.integers(1, 8))
    def uncache(self, block: int) -> None:
        self.pool.uncache(block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        blocks = set(self.owners[data.draw(st.sampled_from(sorted(self.owners)))])
        fresh = blocks - self.quarantined - self.pool.cached_ids()
        self.pool.quarantine(sorted(fresh))
        self.quarantined |= fresh

    @precondition(lambda self: self.quarantined)
    @rule()
    def lift(self) -> None:
        self.pool.lift(sorted(self.quarantined))
        self.quarantined.clear()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        held = Counter(block for number, blocks in self.owners.items() if number != owner for block in blocks)
        if any(block in self.quarantined and not held[block] for block in self.owners[owner]):
            return
        self.pool.release(reversed(self.owners.pop(owner)))

    @invariant()
    def accounts_add_up(self) -> None:
        check_block_accounts(
            total=8,
            free=self.pool.free_ids(),
            idle_cached=self.pool.idle_ids(),
            refs=self.pool.reference_counts(),
            owners={str(number): blocks for number, blocks in self.owners.items()},
        )
        assert self.pool.available == 8 - len(self.pool.reference_counts())
        assert set(self.pool.idle_ids()) <= self.pool.cached_ids()
        assert self.quarantined <= set(self.pool.reference_counts())

    def teardown(self) -> None:
        """Once all owners have let go, every block can be given again."""
        if self.quarantined:
            self.lift()
        for blocks in self.owners.values():
            self.pool.release(blocks)
        assert self.pool.available == self.pool.total


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=260, stateful_step_count=80, deadline=None)  # 20,000 steps
