"""The prefix cache: hits by content, no hit by a mere hash, and events that rebuild it elsewhere."""

import itertools
import random

from kvferry_runtime.core.prefix_cache import CachedBlock, PrefixCache
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.hashing import chain_hashes
from kvferry_wire.state import BlocksRemoved, BlocksStored, Cleared, StateEvent
from tests.runtime.core.builders import BLOCK, assert_at_rest, make_driver, make_submit

EXTRAS = KeyExtras(tenant_salt=b"a").canonical()


def publish_chain(cache: PrefixCache, tokens: list[int], hashes: list[bytes], blocks: list[int]) -> None:
    for index, (name, block) in enumerate(zip(hashes, blocks, strict=True)):
        own = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
        cache.publish(CachedBlock(name, hashes[index - 1] if index else None, own, EXTRAS, block))


def match(cache: PrefixCache, tokens: list[int], hashes: list[bytes], extras: bytes = EXTRAS) -> list[int]:
    return cache.match(
        iter(hashes), lambda index: tokens[index * BLOCK : (index + 1) * BLOCK], extras, len(tokens) // BLOCK
    )


def test_the_longest_cached_prefix_is_found() -> None:
    """A chain matches up to its first unknown block."""
    cache = PrefixCache(100)
    tokens = list(range(12))
    hashes = chain_hashes(b"k", tokens, BLOCK, KeyExtras(tenant_salt=b"a"))
    publish_chain(cache, tokens, hashes, [5, 6, 7])
    assert match(cache, tokens, hashes) == [5, 6, 7]
    cache.remove(6)
    assert match(cache, tokens, hashes) == [5]


def test_an_equal_hash_of_other_tokens_is_no_hit() -> None:
    """Token ids, extras and parent are compared on a hit; what differs is counted as a collision (B023)."""
    cache = PrefixCache(100)
    tokens = list(range(8))
    hashes = [b"same1", b"same2"]
    publish_chain(cache, tokens, hashes, [1, 2])
    assert match(cache, [9, *tokens[1:]], hashes) == []
    assert match(cache, [*tokens[:7], 9], hashes) == [1]
    assert match(cache, tokens, hashes, KeyExtras(tenant_salt=b"b").canonical()) == []
    assert cache.match(iter([b"same2"]), lambda index: tokens[4:], EXTRAS, 1) == []
    assert cache.collisions == 4


def test_a_hash_of_eight_bits_serves_no_wrong_block() -> None:
    """With hashes cut to one byte, 300 random prompts only ever hit blocks of their own tokens (B023)."""
    random_source = random.Random(1)
    cache = PrefixCache(10_000)
    content: dict[int, list[int]] = {}
    for block, _ in zip(itertools.count(1), range(300), strict=False):
        tokens = [random_source.randrange(50) for _ in range(BLOCK)]
        hashes = [name[:1] for name in chain_hashes(b"k", tokens, BLOCK, KeyExtras(tenant_salt=b"a"))]
        for hit in match(cache, tokens, hashes):
            assert content[hit] == tokens
        content[block] = tokens
        publish_chain(cache, tokens, hashes, [block])
    assert cache.collisions > 0


def test_the_first_block_of_a_content_keeps_its_name() -> None:
    """A second block of equal content is not published; a block has one name."""
    cache = PrefixCache(100)
    entry = CachedBlock(b"x", None, (1, 2, 3, 4), EXTRAS, 1)
    assert cache.publish(entry)
    assert not cache.publish(CachedBlock(b"x", None, (1, 2, 3, 4), EXTRAS, 2))
    assert not cache.publish(CachedBlock(b"y", None, (1, 2, 3, 5), EXTRAS, 1))
    assert cache.hashes() == (b"x",)


def test_events_join_runs_and_keep_the_order() -> None:
    """Consecutive blocks of a chain are one ``BlocksStored``; removals in a row are one ``BlocksRemoved``."""
    cache = PrefixCache(100)
    tokens = list(range(12))
    publish_chain(cache, tokens, [b"a", b"b", b"c"], [1, 2, 3])
    cache.publish(CachedBlock(b"z", None, (9, 9, 9, 9), EXTRAS, 4))
    cache.remove(3)
    cache.remove(2)
    assert cache.drain_events() == [
        BlocksStored(hashes=(b"a", b"b", b"c"), parent=None),
        BlocksStored(hashes=(b"z",), parent=None),
        BlocksRemoved(hashes=(b"c", b"b")),
    ]
    assert cache.drain_events() == []


def replay(events: list[StateEvent], known: set[bytes]) -> set[bytes]:
    for event in events:
        if isinstance(event, Cleared):
            known = set()
        elif isinstance(event, BlocksStored):
            known |= set(event.hashes)
        elif isinstance(event, BlocksRemoved):
            known -= set(event.hashes)
    return known


def test_events_that_nobody_fetched_are_replaced_by_the_whole_cache() -> None:
    """The buffer has a cap; a reader that comes after it was reached ends with the same set of hashes."""
    cache = PrefixCache(10)
    for number in range(200):
        cache.publish(CachedBlock(b"%d" % number, None, (number,) * BLOCK, EXTRAS, number))
        if number >= 5:
            cache.remove(number - 5)
    events = cache.drain_events()
    assert len(events) <= 20
    assert replay(events, set()) == set(cache.hashes())


def test_a_reset_unpublishes_all_and_takes_nothing_from_owners() -> None:
    """After a reset nothing is found, running legs go on, and a reader of the events knows nothing either."""
    driver = make_driver()
    prompt = list(range(100, 110))
    driver.send(make_submit("a", prompt, max_tokens=6))
    driver.step()
    known = replay(driver.core.drain_kv_events(), set())
    assert known == set(driver.core.snapshot_hashes()) != set()
    driver.core.reset_prefix_cache()
    driver.core.check_integrity()
    assert driver.core.snapshot_hashes() == ()
    assert replay(driver.core.drain_kv_events(), known) == set()
    driver.run()
    assert len(driver.ids("a")) == 6
    assert_at_rest(driver.core)
    driver.send(make_submit("b", prompt))
    driver.step()
    assert driver.plan.rows[0].first == 0


def test_random_traffic_keeps_the_events_equal_to_the_cache() -> None:
    """A reader that applies every event knows exactly the hashes that the cache holds."""
    random_source = random.Random(3)
    driver = make_driver(blocks=9, budget=8)
    known: set[bytes] = set()
    for number in range(60):
        shared = random_source.randrange(3)
        tail = [random_source.randrange(50) for _ in range(random_source.randrange(1, 9))]
        driver.send(make_submit(f"r{number}", [shared] * 8 + tail, max_tokens=random_source.randrange(1, 9)))
        for _ in range(random_source.randrange(6)):
            driver.step()
            known = replay(driver.core.drain_kv_events(), known)
            assert known == set(driver.core.snapshot_hashes())
    driver.run()
    assert_at_rest(driver.core)


def test_a_tenant_never_hits_blocks_of_another() -> None:
    """The same prompt under another salt is computed anew."""
    driver = make_driver()
    prompt = list(range(100, 112))
    for name, salt in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        driver.send(make_submit(name, prompt, salt=salt, max_tokens=1))
        driver.run()
    assert [plan.rows[0].first for plan in driver.plans] == [0, 0, 8]
