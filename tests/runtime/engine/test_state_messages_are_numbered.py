"""The state stream: a number per message, load on change and each second, snapshots that agree with the numbers."""

import itertools

from kvferry_runtime.engine.state_stream import StateNumbers
from kvferry_wire.limits import Limits
from kvferry_wire.state import BlocksRemoved, BlocksStored, Cleared, Load

INCARNATION = bytes(range(16))


def make_load(running: int = 0) -> Load:
    return Load(running=running, waiting=0, queued_tokens=0, free_blocks=9, total_blocks=9, leases=0, draining=False)


def test_numbers_go_up_by_one_and_load_follows_events() -> None:
    """Events first, in order, then the load."""
    numbers = StateNumbers(INCARNATION, Limits())
    stored = BlocksStored(hashes=(b"a",), parent=None)
    messages = list(numbers.messages([stored, Cleared()], make_load(), 5.0))
    assert [message.sequence for message in messages] == [1, 2, 3]
    assert [message.event for message in messages] == [stored, Cleared(), make_load()]
    assert {message.incarnation for message in messages} == {INCARNATION}


def test_load_is_sent_on_change_and_each_second() -> None:
    """An unchanged load stays silent until the interval is over."""
    numbers = StateNumbers(INCARNATION, Limits(load_interval_s=1.0))
    assert len(list(numbers.messages([], make_load(), 0.0))) == 1
    assert not list(numbers.messages([], make_load(), 0.9))
    assert len(list(numbers.messages([], make_load(1), 0.95))) == 1
    assert not list(numbers.messages([], make_load(1), 1.9))
    assert len(list(numbers.messages([], make_load(1), 1.95))) == 1


def test_a_long_event_is_cut_into_a_chain() -> None:
    """Each piece's parent is the last hash before it, so a reader sees one chain."""
    numbers = StateNumbers(INCARNATION, Limits())
    hashes = tuple(index.to_bytes(16, "big") for index in range(10_000))
    messages = list(numbers.messages([BlocksStored(hashes=hashes, parent=b"root")], make_load(), 0.0))
    pieces = [message.event for message in messages if isinstance(message.event, BlocksStored)]
    assert tuple(digest for piece in pieces for digest in piece.hashes) == hashes
    assert pieces[0].parent == b"root"
    for before, after in itertools.pairwise(pieces):
        assert after.parent == before.hashes[-1]
    removed = list(numbers.messages([BlocksRemoved(hashes=hashes)], make_load(), 0.0))
    assert sum(len(m.event.hashes) for m in removed if isinstance(m.event, BlocksRemoved)) == 10_000


def test_a_snapshot_says_how_far_it_goes() -> None:
    """Its sequence is that of the last message, so later messages and only those apply to it."""
    numbers = StateNumbers(INCARNATION, Limits())
    list(numbers.messages([Cleared()], make_load(), 0.0))
    snapshot = numbers.snapshot((b"h",), make_load())
    assert (snapshot.sequence, snapshot.hashes, snapshot.incarnation) == (2, (b"h",), INCARNATION)
