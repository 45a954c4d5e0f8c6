"""The flow's table: every event at every state is decided, and an impossible one changes nothing."""

import copy

import pytest

from kvferry_router.flow import RequestFlow
from kvferry_router.flow_messages import (
    AbortLeg,
    ClientGone,
    Event,
    FailAnswer,
    FinishAnswer,
    LegClosed,
    LegFrames,
    NeedPod,
    PodChosen,
    Record,
    Start,
    Stopping,
    Tick,
)
from kvferry_router.flow_states import TRANSITIONS, IllegalEventError, State
from kvferry_wire.frames import Fail
from kvferry_wire.limits import Limits

from .builders import make_end, make_handle, make_leg, make_prefilled, make_tokens

EVENTS: tuple[Event, ...] = (
    Start(prefill="p1", decode="d1"),
    PodChosen("prefill", "p2"),
    LegFrames(0, (make_tokens(1),)),
    LegClosed(0, "cut"),
    ClientGone(),
    Stopping(),
    Tick(),
)


def state_of(value: object) -> object:
    """All that a flow consists of, as plain values."""
    if type(value).__module__.startswith("kvferry_router") and not isinstance(value, State):
        names = vars(value) if hasattr(value, "__dict__") else value.__slots__  # type: ignore[attr-defined]
        return {name: state_of(getattr(value, name)) for name in names}
    return copy.deepcopy(value)


def make_flow() -> RequestFlow:
    return RequestFlow(make_leg(), Limits(), deadline_s=60.0, accepted_at=0.0, policy="retry")


def bring_to(state: State) -> RequestFlow:
    """A flow in this state, by the shortest way."""
    flow = make_flow()
    busy = Fail(kind="busy", message="full")
    steps: dict[State, tuple[Event, ...]] = {
        State.NEW: (),
        State.PREFILLING: (Start("p1", "d1"),),
        State.CHOOSING_PREFILL: (Start("p1", "d1"), LegFrames(0, (busy,))),
        State.WAITING_FOR_PREFILL: (Start("p1", "d1"), LegFrames(0, (busy,)), PodChosen("prefill", None)),
        State.WAITING_FOR_DECODE: (Start(None, "d1"), LegFrames(0, (make_tokens(1), busy)), PodChosen("decode", None)),
        State.DECODING: (Start("p1", "d1"), LegFrames(0, (make_prefilled(handle=make_handle()),))),
        State.CHOOSING_DECODE: (Start(None, "d1"), LegFrames(0, (busy,))),
        State.STREAMING: (Start(None, "d1"), LegFrames(0, (make_tokens(1),))),
        State.ENDING: (Start(None, "d1"), LegFrames(0, (make_tokens(1), make_end()))),
        State.DONE: (Start(None, "d1"), ClientGone()),
    }
    for event in steps[state]:
        flow.handle(event, 1.0)
    assert flow.state is state
    return flow


def test_table_names_each_state_and_event_once() -> None:
    """The table has a cell for each pair, and no other; what it names is there."""
    assert set(TRANSITIONS) == {(state, type(event)) for state in State for event in EVENTS}
    assert [name for name in TRANSITIONS.values() if name is not None and not hasattr(RequestFlow, name)] == []


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_is_handled_or_refused_without_effect(state: State, event: Event) -> None:
    """An illegal pair raises and leaves the flow as it was; a legal one keeps bookings and state in step."""
    flow = bring_to(state)
    before = state_of(flow)
    if TRANSITIONS[state, type(event)] is None:
        with pytest.raises(IllegalEventError, match=state.value):
            flow.handle(event, 2.0)
        assert state_of(flow) == before
        return
    if state is State.CHOOSING_DECODE and isinstance(event, PodChosen):
        with pytest.raises(IllegalEventError):
            flow.handle(event, 2.0)
        assert state_of(flow) == before
        return
    effects = flow.handle(event, 2.0)
    records = [effect for effect in effects if isinstance(effect, Record)]
    assert len(records) == (1 if flow.state is State.DONE and state is not State.DONE else 0)
    if flow.state is State.DONE:
        assert flow.booked() == {}
        assert flow.next_wakeup() is None
    else:
        assert flow.next_wakeup() is not None
    if any(isinstance(effect, NeedPod) for effect in effects):
        assert flow.state in (State.CHOOSING_PREFILL, State.CHOOSING_DECODE)


@pytest.mark.parametrize("state", [state for state in State if state is not State.DONE], ids=lambda state: state.value)
def test_client_that_leaves_ends_every_state(state: State) -> None:
    """A client may leave at any stage: one record, no booking left, no leg left open."""
    flow = bring_to(state)
    effects = flow.handle(ClientGone(), 2.0)
    assert [effect.outcome for effect in effects if isinstance(effect, Record)] == ["cancelled"]
    assert flow.booked() == {}
    assert flow.handle(LegFrames(0, (make_tokens(1),)), 3.0) == []


@pytest.mark.parametrize("state", [state for state in State if state is not State.DONE], ids=lambda state: state.value)
def test_deadline_ends_every_state(state: State) -> None:
    """At the request's deadline every state ends by its own tick, whatever is open."""
    flow = bring_to(state)
    flow.handle(Tick(), 60.0)
    assert flow.state is State.DONE


STOPPED_AT: dict[State, list[AbortLeg]] = {
    State.NEW: [],
    State.PREFILLING: [AbortLeg(0, "p1")],
    State.CHOOSING_PREFILL: [],
    State.DECODING: [AbortLeg(1, "d1"), AbortLeg(0, "p1")],
    State.CHOOSING_DECODE: [],
    State.WAITING_FOR_PREFILL: [],
    State.WAITING_FOR_DECODE: [],
    State.STREAMING: [AbortLeg(0, "d1")],
}


@pytest.mark.parametrize("state", STOPPED_AT, ids=lambda state: state.value)
def test_router_that_stops_fails_the_answer_and_frees_both_pods(state: State) -> None:
    """An explicit error, in the stream once it has begun; each open leg and held lease is aborted; one record."""
    flow = bring_to(state)
    effects = flow.handle(Stopping(), 2.0)
    (fail,) = [effect for effect in effects if isinstance(effect, FailAnswer)]
    assert (fail.failure.status, fail.failure.code) == (503, "stopping")
    assert fail.failure.retry_after_s is not None
    assert fail.in_band == (state in (State.STREAMING, State.WAITING_FOR_DECODE))
    assert [effect for effect in effects if isinstance(effect, AbortLeg)] == STOPPED_AT[state]
    assert [effect.outcome for effect in effects if isinstance(effect, Record)] == ["stopping"]
    assert flow.booked() == {}
    assert flow.handle(ClientGone(), 3.0) == []


def test_answer_whose_end_is_here_is_finished_when_the_router_stops() -> None:
    """`End` is whole by itself: the client gets it at once, without the grace."""
    flow = bring_to(State.ENDING)
    effects = flow.handle(Stopping(), 2.0)
    assert len([effect for effect in effects if isinstance(effect, FinishAnswer)]) == 1
    assert [effect.outcome for effect in effects if isinstance(effect, Record)] == ["ok"]
