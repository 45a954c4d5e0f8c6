"""An idle engine's books: what is live at once, all blocks a slice at a time, and each fault is found and named."""

from collections.abc import Callable

import pytest

from kvferry_runtime.core.idle_walk import IdleWalk
from kvferry_runtime.core.integrity import IntegrityError
from kvferry_runtime.core.kv_manager import KVManager
from kvferry_runtime.core.prefix_cache import CachedBlock

from .builders import make_config

BLOCKS = 40
SLICE = 8
TURNS = 2 * BLOCKS // SLICE  # of a walk, at most: the free list, and then every block


def make_kv() -> KVManager:
    """Blocks in each place: 1 to 4 idle in the cache, 5 and 6 under a lease and cached, 7 leased alone, others free."""
    kv = KVManager(make_config(blocks=BLOCKS + 1))
    blocks = kv.pool.allocate(7)
    for block in blocks[:6]:
        kv.cache.publish(CachedBlock(bytes([block]) * 16, None, (block,), b"", block))
        kv.pool.mark_cached(block)
    kv.pool.release(blocks[:4])
    kv.leases[1] = tuple(blocks[4:])
    return kv


def walked(kv: KVManager) -> IdleWalk:
    walk = IdleWalk(kv, SLICE)
    for _ in range(TURNS + 1):
        if walk.turn():
            return walk
    raise AssertionError("the walk does not end")


def test_sound_books_are_walked_to_their_end() -> None:
    """Within as many turns as there are slices; afterwards a turn looks at nothing more."""
    kv = make_kv()
    kv.check_accounts(())
    walk = walked(kv)
    assert walk.turn()


def test_a_turn_looks_at_one_slice() -> None:
    """However many blocks there are."""
    kv = make_kv()
    walk, looked = IdleWalk(kv, SLICE), [0]
    real = kv.pool.references

    def counted(block: int) -> int:
        looked[0] += 1
        return real(block)

    kv.pool.references = counted  # type: ignore[method-assign]
    while not walk.turn():
        assert looked[0] <= SLICE
        looked[0] = 0


def test_a_walk_begins_anew_when_a_block_changes_hands() -> None:
    """What was seen of the books before says nothing of them now."""
    kv = make_kv()
    walk = walked(kv)
    block = kv.pool.allocate(1)
    assert not walk.turn()
    while not walk.turn():
        pass
    kv.pool.release(block)
    assert not walk.turn()


def lost(kv: KVManager) -> None:
    kv.pool._free.pop()


def doubled(kv: KVManager) -> None:
    kv.pool._free[0] = kv.pool._free[1]


def free_and_idle(kv: KVManager) -> None:
    kv.pool._free[0] = 1


def free_and_leased(kv: KVManager) -> None:
    kv.pool._free[0] = 7


def unknown(kv: KVManager) -> None:
    kv.pool._free[0] = BLOCKS + 1


def the_null_block(kv: KVManager) -> None:
    kv.pool._free[0] = 0


def without_a_name(kv: KVManager) -> None:
    del kv.cache._by_hash[kv.cache._by_block[2].hash]


def by_the_name_of_another(kv: KVManager) -> None:
    kv.cache._by_hash[kv.cache._by_block[2].hash] = kv.cache._by_block[3]


def without_a_mark(kv: KVManager) -> None:
    kv.pool._cached.discard(5)


def marked_for_nothing(kv: KVManager) -> None:
    kv.pool._cached.add(7)


FAULTS: tuple[Callable[[KVManager], None], ...] = (
    *(lost, doubled, free_and_idle, free_and_leased, unknown, the_null_block),
    *(without_a_name, by_the_name_of_another, without_a_mark, marked_for_nothing),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_found_by_the_walk(fault: Callable[[KVManager], None]) -> None:
    """And by the check of everything at once, which is the walk's twin."""
    kv = make_kv()
    fault(kv)
    with pytest.raises(IntegrityError):
        kv.check_integrity(())
    with pytest.raises(IntegrityError, match="block"):
        walked(kv)


def without_an_owner(kv: KVManager) -> None:
    kv.leases.clear()


def with_an_owner_too_many(kv: KVManager) -> None:
    kv.leases[2] = (7,)


@pytest.mark.parametrize("fault", [lost, without_an_owner, with_an_owner_too_many], ids=lambda fault: fault.__name__)
def test_what_is_live_is_judged_at_once(fault: Callable[[KVManager], None]) -> None:
    """References and their owners, and that places add up, without a look at each block."""
    kv = make_kv()
    fault(kv)
    with pytest.raises(IntegrityError, match="block accounts"):
        kv.check_accounts(())
