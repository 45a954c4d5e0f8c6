"""The prefix index against brute force, on random streams of events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_router.index.naive import NaiveIndex
from kvferry_router.index.prefix_index import PrefixIndex

PODS = ("a", "b", "c")
HASHES = tuple(bytes([i]) * 16 for i in range(12))

pods = st.sampled_from(PODS)
hashes = st.lists(st.sampled_from(HASHES), max_size=8)
events = st.lists(
    st.one_of(
        st.tuples(st.just("store"), pods, hashes),
        st.tuples(st.just("remove"), pods, hashes),
        st.tuples(st.just("drop"), pods, st.just([])),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(events, st.lists(hashes, min_size=1, max_size=4))
def test_matches_are_equal_on_random_streams(
    stream: list[tuple[str, str, list[bytes]]], asks: list[list[bytes]]
) -> None:
    """After any events both give the same run of leading blocks for each pod, and the two views agree."""
    fast, naive = PrefixIndex(max_blocks=1000), NaiveIndex()
    for name, pod, blocks in stream:
        for index in (fast, naive):
            if name == "store":
                index.store(pod, blocks)
            elif name == "remove":
                index.remove(pod, blocks)
            else:
                index.drop(pod)
    fast.check_integrity()
    assert fast.blocks == naive.blocks
    for ask in [*asks, list(HASHES)]:
        assert fast.match(ask) == naive.match(ask)


def test_room_is_bounded_and_what_is_left_out_is_counted() -> None:
    """Entries beyond the cap are dropped, which costs hits; room comes back with removals."""
    index = PrefixIndex(max_blocks=3)
    index.store("a", HASHES[:5])
    assert (index.blocks, index.dropped) == (3, 2)
    assert index.match(HASHES[:5]) == {"a": 3}
    index.drop("a")
    index.store("b", HASHES[:2])
    assert index.match(HASHES[:5]) == {"b": 2}
    index.check_integrity()


def test_gap_in_the_chain_ends_the_run() -> None:
    """Only leading blocks count: a later one without its parents is of no use."""
    index = PrefixIndex(max_blocks=100)
    index.store("a", (HASHES[0], HASHES[2]))
    index.store("b", HASHES[1:3])
    assert index.match(HASHES[:3]) == {"a": 1}


def test_slots_of_dropped_pods_are_used_again() -> None:
    """A pod that comes and goes a thousand times leaves masks no wider than the pods there are."""
    index = PrefixIndex(max_blocks=100)
    index.store("stays", HASHES[:1])
    for turn in range(1000):
        index.store(f"pod-{turn}", HASHES[:2])
        index.drop(f"pod-{turn}")
    assert index.match(HASHES[:2]) == {"stays": 1}
    assert max(index._bits.values()).bit_length() == 1
