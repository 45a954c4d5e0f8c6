"""The state feed: its index equals the pod's blocks whatever is lost, late, repeated or restarted."""

import random

import pytest

from kvferry_router.index.feed import FeedEffect, FeedState, FetchSnapshot, Forget, Remove, Replace, StateFeed, Store
from kvferry_wire.limits import Limits
from kvferry_wire.state import BlocksRemoved, BlocksStored, Cleared, Load, Snapshot, StateEvent, StateMessage

INCARNATION, OTHER = bytes(16), bytes([1]) * 16


def make_load(waiting: int = 0) -> Load:
    return Load(running=0, waiting=waiting, queued_tokens=0, free_blocks=10, total_blocks=10, leases=0, draining=False)


def make_hash(number: int) -> bytes:
    return number.to_bytes(16, "little")


def message(sequence: int, event: StateEvent | None = None, incarnation: bytes = INCARNATION) -> StateMessage:
    stored = BlocksStored(hashes=(make_hash(sequence),), parent=None)
    return StateMessage(incarnation=incarnation, sequence=sequence, event=stored if event is None else event)


def snapshot(sequence: int, *blocks: int, incarnation: bytes = INCARNATION) -> Snapshot:
    return Snapshot(incarnation=incarnation, sequence=sequence, hashes=tuple(map(make_hash, blocks)), load=make_load())


def apply(held: set[bytes], effects: list[FeedEffect]) -> list[int]:
    """Play effects on a set of blocks; returns the numbers of the snapshots asked for."""
    fetches = []
    for effect in effects:
        match effect:
            case FetchSnapshot(number):
                fetches.append(number)
            case Replace(hashes):
                held.clear()
                held.update(hashes)
            case Store(hashes):
                held.update(hashes)
            case Remove(hashes):
                held.difference_update(hashes)
            case Forget():
                held.clear()
    return fetches


def make_live(*blocks: int, sequence: int = 20) -> StateFeed:
    feed = StateFeed(Limits())
    feed.start(0.0)
    feed.message(message(sequence, make_load()), 0.1)
    feed.snapshot(1, snapshot(sequence, *blocks), 0.2)
    assert feed.state is FeedState.LIVE
    return feed


def test_join_applies_only_what_is_later_than_the_snapshot() -> None:
    """Messages buffered during the fetch are applied once: those in the snapshot are not applied again."""
    feed, held = StateFeed(Limits()), set[bytes]()
    feed.start(0.0)
    assert apply(held, feed.message(message(20), 0.1)) == [1]
    for sequence in (21, 22, 23):
        assert apply(held, feed.message(message(sequence), 0.1)) == []
    apply(held, feed.snapshot(1, snapshot(21, 5, 20, 21), 0.2))
    assert held == set(map(make_hash, (5, 20, 21, 22, 23)))
    apply(held, feed.message(message(24, BlocksRemoved(hashes=(make_hash(5),))), 0.3))
    assert held == set(map(make_hash, (20, 21, 22, 23)))
    apply(held, feed.message(message(25, Cleared()), 0.3))
    assert held == set()


def test_lost_messages_are_noticed_and_the_index_is_rebuilt() -> None:
    """A hole in the numbers drops the entries, is counted and joins again."""
    feed, held = make_live(1, 2), set(map(make_hash, (1, 2)))
    assert apply(held, feed.message(message(24), 1.0)) == [2]
    assert held == set()
    assert feed.rejoins["gap"] == 1
    assert not feed.fresh(1.0)
    apply(held, feed.snapshot(2, snapshot(24, 1, 24), 1.1))
    assert held == set(map(make_hash, (1, 24)))
    assert feed.fresh(1.1)


def test_new_incarnation_voids_the_entries() -> None:
    """A pod that restarted starts with nothing, also when its numbers happen to fit."""
    feed, held = make_live(1, 2), set(map(make_hash, (1, 2)))
    fetches = apply(held, feed.message(message(21, make_load(), OTHER), 1.0))
    assert (fetches, held, feed.rejoins["incarnation"]) == ([2], set(), 1)
    apply(held, feed.snapshot(2, snapshot(22, 9, incarnation=OTHER), 1.1))
    assert held == {make_hash(9)}
    assert feed.incarnation == OTHER


def test_snapshot_of_another_incarnation_than_the_stream_is_not_taken() -> None:
    """The snapshot is of the pod before its restart, the stream of the one after: ask again."""
    feed, held = StateFeed(Limits()), set[bytes]()
    feed.start(0.0)
    apply(held, feed.message(message(1, make_load(), OTHER), 0.1))
    assert apply(held, feed.snapshot(1, snapshot(50, 1, 2), 0.2)) == []
    assert held == set()
    assert apply(held, feed.tick(1.3)) == [2]
    apply(held, feed.snapshot(2, snapshot(1, 7, incarnation=OTHER), 1.4))
    assert held == {make_hash(7)}


def test_old_snapshot_that_arrives_late_is_ignored() -> None:
    """Only the answer to the newest question counts."""
    feed, held = make_live(1), {make_hash(1)}
    apply(held, feed.message(message(30), 1.0))
    assert feed.snapshot(1, snapshot(20, 1), 1.1) == []
    assert feed.state is FeedState.JOINING


def test_buffer_that_overflows_joins_again() -> None:
    """A snapshot that takes too long costs a new join, never memory without bound."""
    feed = StateFeed(Limits(state_buffer=3))
    feed.start(0.0)
    fetches = []
    for sequence in range(1, 6):
        fetches += apply(set(), feed.message(message(sequence), 0.1))
    assert (fetches, feed.rejoins["overflow"]) == ([1, 2], 1)
    held: set[bytes] = set()
    apply(held, feed.snapshot(2, snapshot(4, 1, 2, 3, 4), 0.2))
    assert held == set(map(make_hash, (1, 2, 3, 4, 5)))


def test_failed_snapshot_is_asked_for_again_after_a_pause() -> None:
    """A pod that is slow to start is not asked without pause."""
    feed = StateFeed(Limits())
    feed.start(0.0)
    assert feed.tick(0.9) == []
    assert feed.tick(1.0) == [FetchSnapshot(1)]
    assert feed.tick(1.5) == []
    feed.snapshot_failed(1, 2.0)
    assert feed.tick(2.5) == []
    assert feed.tick(3.0) == [FetchSnapshot(2)]


def test_silence_makes_the_entries_unused_and_a_word_makes_them_used_again() -> None:
    """Three seconds without a message: not fresh. No message was lost, so one message is enough to be fresh again."""
    feed = make_live(1)
    assert feed.fresh(3.1)
    assert not feed.fresh(3.2)
    assert feed.message(message(21, make_load(3)), 10.0) == []
    assert feed.fresh(10.0)
    assert feed.load is not None
    assert feed.load.waiting == 3


@pytest.mark.parametrize("seed", range(30))
def test_random_stream_with_loss_converges_to_the_pods_blocks(seed: int) -> None:
    """Under loss, delay and restarts the index, when fresh, is the pod's own set at the numbers applied."""
    rng = random.Random(seed)
    feed, held = StateFeed(Limits()), set[bytes]()
    feed.start(0.0)
    now, sequence, incarnation = 0.0, 0, 0
    blocks: set[bytes] = set()
    pending: list[tuple[int, Snapshot]] = []
    fetches: list[int] = []

    def lose() -> bool:
        return rng.random() < 0.1 and now < 40.0

    for _ in range(600):
        now += 0.1
        if rng.random() < 0.01 and now < 40.0:
            incarnation, sequence, blocks = incarnation + 1, 0, set()
        event: StateEvent
        if rng.random() < 0.4:
            event = make_load()
        elif blocks and rng.random() < 0.5:
            event = BlocksRemoved(hashes=(rng.choice(sorted(blocks)),))
            blocks.difference_update(event.hashes)
        else:
            event = BlocksStored(hashes=(make_hash(rng.randrange(50)),), parent=None)
            blocks.update(event.hashes)
        sequence += 1
        if not lose():
            fetches += apply(held, feed.message(message(sequence, event, make_hash(incarnation)), now))
        fetches += apply(held, feed.tick(now))
        for number in fetches:
            if lose():
                feed.snapshot_failed(number, now)
            else:
                taken = Snapshot(
                    incarnation=make_hash(incarnation), sequence=sequence, hashes=tuple(blocks), load=make_load()
                )
                pending.append((number, taken))
        fetches = []
        if pending and rng.random() < 0.5:
            number, taken = pending.pop(0)
            fetches += apply(held, feed.snapshot(number, taken, now))
    assert feed.fresh(now)
    assert held == blocks
