"""The lease's life is its table: every edge is taken, every other pair is refused."""

import itertools

import pytest

from kvferry_runtime.core.messages import LeaseEnded
from kvferry_runtime.transfer.lease import (
    ENDED_STATES,
    LIVE_STATES,
    TRANSITIONS,
    LeaseError,
    LeaseEvent,
    LeaseState,
    LeaseTable,
    advance,
)
from tests.runtime.transfer.builders import READER, make_grant, make_ref, make_table

PAIRS = list(itertools.product(LeaseState, LeaseEvent))
ILLEGAL = [pair for pair in PAIRS if pair not in TRANSITIONS]


def drive(table: LeaseTable, event: LeaseEvent, now: float) -> None:
    """Make the event happen to lease 1 through the public calls."""
    match event:
        case LeaseEvent.ANSWERED:
            table.answered(1, True, now)
        case LeaseEvent.RENEW:
            assert table.renew(make_ref(), now) == "held"
        case LeaseEvent.RELEASE:
            assert table.release(make_ref(), READER, 1, now) == "held"
        case LeaseEvent.FAIL:
            assert table.failed(make_ref(), now) == "held"
        case LeaseEvent.WITHDRAW:
            assert table.withdraw(1, now)
        case LeaseEvent.EXPIRE:
            table.tick(now + 1000.0)


def make_lease_in(state: LeaseState) -> LeaseTable:
    table = make_table()
    table.grant(make_grant(), 0.0)
    path = {
        LeaseState.GRANTED: [],
        LeaseState.HELD: [LeaseEvent.ANSWERED],
        LeaseState.RELEASED: [LeaseEvent.RELEASE],
        LeaseState.FAILED: [LeaseEvent.FAIL],
        LeaseState.EXPIRED: [LeaseEvent.EXPIRE],
        LeaseState.WITHDRAWN: [LeaseEvent.WITHDRAW],
    }
    for event in path[state]:
        drive(table, event, 0.0)
    assert table.state_of(1) is state
    return table


@pytest.mark.parametrize(("state", "event"), TRANSITIONS, ids=lambda value: value.value)
def test_each_legal_edge_is_taken(state: LeaseState, event: LeaseEvent) -> None:
    """A live lease goes where the table says, and its end is told exactly once."""
    table = make_lease_in(state)
    drive(table, event, 1.0)
    expected = TRANSITIONS[state, event]
    assert table.state_of(1) is expected
    ended = [LeaseEnded(lease_id=1, why=expected.value)] if expected in ENDED_STATES else []
    assert table.take_ended() in ([], ended)  # `tick` returns what it ended
    assert table.take_ended() == []
    assert sum(table.ended.values()) == len(ended)
    table.check_integrity()


@pytest.mark.parametrize(("state", "event"), ILLEGAL, ids=lambda value: value.value)
def test_each_illegal_pair_is_refused(state: LeaseState, event: LeaseEvent) -> None:
    """A pair outside the table raises an error that names both."""
    with pytest.raises(LeaseError, match=f"{state.value}.*{event.value}"):
        advance(state, event)


@pytest.mark.parametrize("state", sorted(ENDED_STATES, key=lambda state: state.value), ids=lambda state: state.value)
def test_nothing_revives_an_ended_lease(state: LeaseState) -> None:
    """After its end no call makes a lease live again, ends it twice or lets it be read."""
    table = make_lease_in(state)
    table.take_ended()
    table.answered(1, True, 1.0)
    table.answered(1, False, 1.0)
    assert not table.withdraw(1, 1.0)
    for answer in (
        table.renew(make_ref(), 1.0),
        table.failed(make_ref(), 1.0),
        table.release(make_ref(), READER, 99, 1.0),
        table.lookup(make_ref()).answer,
    ):
        assert answer in {"expired", "unknown"}
    assert table.lookup(make_ref()).blocks == ()
    assert table.tick(10_000.0) == []
    assert table.live() == 0
    table.check_integrity()


def test_only_the_ends_have_no_way_out() -> None:
    """Live states know every event; ended ones know none."""
    for state, event in PAIRS:
        assert ((state, event) in TRANSITIONS) == (state in LIVE_STATES)


def test_grants_that_cannot_be_are_refused_by_field() -> None:
    """A used id, another epoch, ragged or empty groups and a full table raise an error naming the field."""
    table = make_table(leases=2)
    table.grant(make_grant(5), 0.0)
    for grant, named in (
        (make_grant(5), "lease_id"),
        (make_grant(4), "lease_id"),
        (make_grant(6, epoch=2), "epoch"),
        (make_grant(6, blocks=0), "blocks"),
    ):
        with pytest.raises(LeaseError, match=named):
            table.grant(grant, 0.0)
    table.grant(make_grant(6), 0.0)
    with pytest.raises(LeaseError, match="leases"):
        table.grant(make_grant(7), 0.0)
    assert table.granted == 2
    table.check_integrity()
