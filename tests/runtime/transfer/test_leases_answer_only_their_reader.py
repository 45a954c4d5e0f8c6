"""``held`` is said only to who names the lease right, and a repeated `Release` gets its first answer."""

import pytest

from kvferry_runtime.core.messages import LeaseEnded
from kvferry_runtime.transfer.lease import LeaseError
from tests.runtime.transfer.builders import OWNER, READER, make_grant, make_ref, make_table

WRONG = {
    "another id": {"lease_id": 2},
    "another incarnation": {"incarnation": b"z" * 16},
    "empty incarnation": {"incarnation": b""},
    "an older epoch": {"epoch": 0},
    "a later epoch": {"epoch": 2},
    "another digest": {"prompt_digest": b"e" * 32},
    "a prefix of the digest": {"prompt_digest": b"d" * 31},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_a_lease_named_wrong_is_unknown(changes: dict[str, object]) -> None:
    """Each of id, incarnation, epoch and digest must agree; the lease is untouched otherwise."""
    table = make_table()
    table.grant(make_grant(), 0.0)
    ref = make_ref(**changes)
    assert table.renew(ref, 1.0) == "unknown"
    assert table.release(ref, READER, 1, 1.0) == "unknown"
    assert table.failed(ref, 1.0) == "unknown"
    assert table.lookup(ref).answer == "unknown"
    assert table.take_ended() == []
    assert table.release(make_ref(), READER, 2, 1.0) == "held"


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_an_expired_lease_named_wrong_is_unknown_too(changes: dict[str, object]) -> None:
    """What is remembered of an ended lease is told only to who names it right."""
    table = make_table()
    table.grant(make_grant(), 0.0)
    table.tick(1000.0)
    assert table.renew(make_ref(), 1000.0) == "expired"
    assert table.renew(make_ref(**changes), 1000.0) == "unknown"


def test_a_repeated_release_gets_the_same_answer() -> None:
    """The same reader incarnation, message id and lease hear ``held`` again; any other hears ``unknown``."""
    table = make_table()
    table.grant(make_grant(), 0.0)
    assert table.release(make_ref(), READER, 7, 1.0) == "held"
    assert [table.release(make_ref(), READER, 7, now) for now in (1.0, 2.0, 500.0)] == ["held"] * 3
    assert table.release(make_ref(), READER, 8, 1.0) == "unknown"
    assert table.release(make_ref(), b"other reader", 7, 1.0) == "unknown"
    assert table.release(make_ref(prompt_digest=b"e" * 32), READER, 7, 1.0) == "unknown"
    assert table.take_ended() == [LeaseEnded(lease_id=1, why="released")]


def test_the_memory_of_replies_is_bounded() -> None:
    """The oldest answers are forgotten first, and then a repeat is unknown: safe, for it voids the read."""
    table = make_table(reply_memory=3)
    for lease_id in range(1, 6):
        table.grant(make_grant(lease_id), 0.0)
        assert table.release(make_ref(lease_id), READER, lease_id, 0.0) == "held"
    answers = [table.release(make_ref(lease_id), READER, lease_id, 0.0) for lease_id in range(1, 6)]
    assert answers == ["unknown", "unknown", "held", "held", "held"]
    table.check_integrity()


def test_ended_leases_are_remembered_for_a_bounded_while() -> None:
    """A reader hears ``expired`` for `ended_lease_s`, for at most `ended_leases` of them, then ``unknown``."""
    table = make_table(ended_lease_s=60.0, ended_leases=2)
    for lease_id in (1, 2, 3):
        table.grant(make_grant(lease_id), 0.0)
    table.tick(30.0)
    assert [table.renew(make_ref(lease_id), 31.0) for lease_id in (1, 2, 3)] == ["unknown", "expired", "expired"]
    table.tick(89.9)
    assert table.renew(make_ref(3), 89.9) == "expired"
    table.tick(90.0)
    assert table.renew(make_ref(3), 90.0) == "unknown"
    table.check_integrity()


def test_an_undelivered_answer_ends_its_lease() -> None:
    """A prefill answer that could not be written withdraws the lease at once, and the reader hears ``expired``."""
    table = make_table()
    table.grant(make_grant(), 0.0)
    table.answered(1, False, 0.0)
    assert table.take_ended() == [LeaseEnded(lease_id=1, why="withdrawn")]
    assert table.renew(make_ref(), 0.0) == "expired"


def test_a_raised_epoch_voids_older_leases() -> None:
    """Leases of the older epoch end, the same names are not held again, and grants need the new epoch."""
    table = make_table()
    table.grant(make_grant(1), 0.0)
    table.answered(1, True, 0.0)
    table.grant(make_grant(2), 0.0)
    table.raise_epoch(2, 1.0)
    assert {end.lease_id: end.why for end in table.take_ended()} == {1: "withdrawn", 2: "withdrawn"}
    assert table.renew(make_ref(1), 1.0) == "expired"
    assert table.renew(make_ref(1, epoch=2), 1.0) == "unknown"
    with pytest.raises(LeaseError, match="epoch"):
        table.raise_epoch(2, 1.0)
    with pytest.raises(LeaseError, match="epoch"):
        table.grant(make_grant(3), 1.0)
    table.grant(make_grant(3, epoch=2), 1.0)
    assert table.renew(make_ref(3, epoch=2), 1.0) == "held"
    assert table.renew(make_ref(3), 1.0) == "unknown"
    table.check_integrity()


def test_lookups_show_the_blocks_of_live_leases_only() -> None:
    """The data plane gets the lease's blocks in its own order, from the grant on."""
    table = make_table()
    table.grant(make_grant(1, blocks=3), 0.0)
    assert table.lookup(make_ref()).blocks == ((1, 2, 3),)
    assert table.lookup(make_ref(incarnation=OWNER + b"x")).blocks == ()


def test_repr_is_a_dump_of_the_state() -> None:
    """The representation holds every lease, its state and its deadline."""
    table = make_table(lease_s=15.0)
    table.grant(make_grant(1), 0.0)
    table.grant(make_grant(2), 0.0)
    table.answered(2, True, 1.0)
    assert "live=[1=granted@30.000, 2=held@16.000]" in repr(table)
