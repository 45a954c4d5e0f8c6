"""The state machine of a sequence: each legal edge, and every illegal pair."""

import itertools
from typing import cast

import pytest

from kvferry_runtime.core.leg import LiveLeg
from kvferry_runtime.core.sequence import TRANSITIONS, Event, IllegalTransitionError, Sequence, State
from tests.runtime.core.builders import make_submit


def make_sequence(state: State) -> Sequence:
    submit = make_submit()
    leg = LiveLeg(submit=submit, arrival=1, deadline=0.0, extras=b"", max_model_len=9, choices=[])
    return Sequence(7, cast(LiveLeg, leg), 0, [1, 2], state)


@pytest.mark.parametrize(("state", "event"), list(TRANSITIONS), ids=lambda value: value.value)
def test_a_listed_event_leads_to_its_state(state: State, event: Event) -> None:
    """Every edge of the table is taken as it is written."""
    sequence = make_sequence(state)
    sequence.apply(event)
    assert sequence.state is TRANSITIONS[state, event]


def test_any_other_event_raises_and_changes_nothing() -> None:
    """An illegal event names sequence, state and event."""
    illegal = [pair for pair in itertools.product(State, Event) if pair not in TRANSITIONS]
    assert len(illegal) == len(State) * len(Event) - len(TRANSITIONS)
    for state, event in illegal:
        sequence = make_sequence(state)
        with pytest.raises(IllegalTransitionError, match=f"sequence 7 is {state.value}: {event.value}"):
            sequence.apply(event)
        assert sequence.state is state


def test_every_state_but_the_last_can_end_and_nothing_leaves_the_last() -> None:
    """A leg can be aborted at any stage."""
    assert {state for state, event in TRANSITIONS if event is Event.END} == set(State) - {State.ENDED}
    assert all(state is not State.ENDED for state, _ in TRANSITIONS)
