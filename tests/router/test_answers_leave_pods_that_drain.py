"""A decode leg that is asked to leave its pod goes on elsewhere with its KV: that is no loss, and has an end."""

import pytest

from kvferry_router.flow import RequestFlow
from kvferry_router.flow_messages import (
    AbortLeg,
    FailurePolicy,
    Ferried,
    LegClosed,
    LegFrames,
    NeedPod,
    OpenLeg,
    PodChosen,
    PodFailed,
    Record,
    Resumed,
    Start,
    Tick,
)
from kvferry_router.moves import Moves, Place
from kvferry_wire.frames import Begun, Fail, Handoff
from kvferry_wire.limits import Limits

from .builders import make_end, make_handle, make_leg, make_prefilled, make_tokens
from .test_flow_resumes_answers import LIMITS, assert_balanced, frames, make_flow, of, one, run, streaming

HANDLE = make_handle(7, tokens=9)


def leaving(flow: RequestFlow, attempt: int, handle: bool = True) -> LegFrames:
    """The router asks, the pod hands over (or has no KV)."""
    flow.asked_to_move()
    return frames(attempt, Handoff(handle=HANDLE) if handle else Fail(kind="draining", message="no KV"))


def test_another_pod_goes_on_with_the_kv() -> None:
    """The handle goes along, the pod that kept it is left alone and no pod has failed; the end tells of the move."""
    flow = make_flow()
    effects = streaming(flow, 5, 6)
    assert flow.movable() == (0, "d1")
    told = run(flow, leaving(flow, 0), now=2.0)
    assert of(PodFailed, told) == []
    assert of(AbortLeg, told) == []
    need = one(NeedPod, told)
    assert (need.kind, need.beside, need.ferried, need.resume) == ("decode", "d1", True, True)
    assert "d1" in need.excluded
    after = run(flow, PodChosen("decode", "d2"), now=2.0)
    leg = one(OpenLeg, after).leg
    assert (leg.handle, leg.resumed, leg.must_pull) == (HANDLE, "moved", False)
    assert leg.choices[0].emitted == (5, 6)
    after += run(flow, frames(1, Begun(cached_tokens=0), make_tokens(7)), now=2.5)
    assert one(Resumed, after).cause == "moved"
    assert one(Ferried, after) == Ferried("d1", "d2", "")
    after += run(flow, frames(1, make_end(completion_tokens=3)), LegClosed(1, "ended"), now=3.0)
    record = one(Record, after)
    assert (record.outcome, record.resumed, record.completion_tokens) == ("ok", ("moved",), 3)
    assert of(AbortLeg, after) == []
    assert_balanced(effects + told + after)


def test_a_handoff_that_nobody_asked_for_breaks_the_protocol() -> None:
    """What such a pod gave is not believed further."""
    flow = make_flow()
    streaming(flow, 5)
    told = run(flow, frames(0, Handoff(handle=HANDLE)))
    assert one(PodFailed, told).reason == "protocol"


def test_nothing_counts_after_the_handoff() -> None:
    """Tokens and a second handoff in the same read, or later, are of a leg that is over."""
    flow = make_flow()
    streaming(flow, 5)
    told = run(flow, leaving(flow, 0))
    told += run(flow, PodChosen("decode", "d2"))
    told += run(flow, frames(0, make_tokens(6), Handoff(handle=make_handle(8))), LegClosed(0, "ended"))
    assert flow.choices()[0].emitted == (5,)
    assert one(OpenLeg, told).leg.handle == HANDLE
    assert flow.movable() == (1, "d2")


@pytest.mark.parametrize("policy", ["recompute", "retry", "fail"])
def test_a_service_that_insists_on_ferried_kv_does_not_insist_on_moved_kv(policy: FailurePolicy) -> None:
    """Nothing of the answer was picked yet: a drain fails no request, whatever the policy says of prefill's KV."""
    flow = RequestFlow(make_leg(max_tokens=64), LIMITS, deadline_s=60.0, accepted_at=0.0, policy=policy)
    run(flow, Start("p1", "d1", "hash"))
    opened = run(flow, frames(0, make_prefilled(5, handle=make_handle(1))))
    assert one(OpenLeg, opened).leg.must_pull == (policy != "recompute")
    told = run(flow, leaving(flow, 1))
    assert of(AbortLeg, told) == [AbortLeg(0, "p1")]  # of the prompt's own lease nothing is needed any more
    leg = one(OpenLeg, run(flow, PodChosen("decode", "d2"))).leg
    assert (leg.handle, leg.must_pull) == (HANDLE, False)


def test_a_leg_without_kv_goes_elsewhere_too() -> None:
    """It is given back: no handle, no fault, another pod."""
    flow = make_flow()
    run(flow, Start(None, "d1", "hash"))
    told = run(flow, leaving(flow, 0, handle=False))
    assert of(PodFailed, told) == []
    leg = one(OpenLeg, run(flow, PodChosen("decode", "d2"))).leg
    assert leg.handle is None


def test_an_answer_does_not_move_for_ever() -> None:
    """Each move counts against the legs that one request may cost."""
    flow = make_flow(limits=Limits(leg_losses=4))
    streaming(flow, 5)
    told = []
    for attempt in range(4):
        told = run(flow, leaving(flow, attempt))
        if attempt < 3:
            told = run(flow, PodChosen("decode", f"d{attempt + 2}"), frames(attempt + 1, make_tokens(6 + attempt)))
    assert one(Record, told).gave_up == "losses"


def test_a_moved_answer_that_finds_no_pod_takes_its_time_and_then_fails_openly() -> None:
    """The lease of its KV is withdrawn with it."""
    flow = make_flow()
    streaming(flow, 5)
    told = run(flow, leaving(flow, 0), PodChosen("decode", None), now=1.0)
    while not of(Record, told):
        now = flow.next_wakeup()
        assert now is not None
        told = run(flow, Tick(), now=now)
        if of(NeedPod, told):
            told += run(flow, PodChosen("decode", None), now=now)
    assert one(Record, told).gave_up == "no_pod"
    assert of(AbortLeg, told) == [AbortLeg(0, "d1")]


def test_only_a_running_decode_leg_can_be_asked() -> None:
    """Not prefill's, not one that has ended, and none whose ids were too many to keep."""
    flow = make_flow()
    assert flow.movable() is None
    run(flow, Start("p1", "d1", "hash"))
    assert flow.movable() is None
    run(flow, frames(0, make_prefilled(5, handle=make_handle(1))))
    assert flow.movable() == (1, "d1")
    run(flow, frames(1, make_end(completion_tokens=1)))
    assert flow.movable() is None
    short = make_flow(limits=Limits(resume_ids_per_request=1))
    streaming(short, 5, 6)
    assert short.movable() is None


def test_legs_are_asked_again_after_a_while_and_so_many_at_a_time() -> None:
    """Only those on pods that leave; what runs no more is forgotten."""
    moves = Moves(Limits(moves=2, move_again_s=1.0))
    places = [Place(f"r{number}", 0, "d1", 64) for number in range(3)]
    other = Place("x", 0, "d2", 64)
    leaving = {"d1": 64}
    assert moves.due([*places, other], leaving, 0.0) == places[:2]
    assert moves.due([*places, other], leaving, 0.1) == places[2:]
    assert moves.due([*places, other], leaving, 0.9) == []
    assert moves.due([places[0], other], leaving, 1.0) == places[:1]
    assert len(moves) == 1
    assert moves.due([places[0], other], {}, 2.0) == []
    assert not len(moves)


def test_an_answer_stays_where_no_stand_in_has_room_for_all_of_it() -> None:
    """It ends where it is: elsewhere it would be cut short, or fail."""
    moves = Moves(Limits())
    short, long = Place("short", 0, "d1", 512), Place("long", 0, "d1", 513)
    assert moves.due([long, short], {"d1": 512}, 0.0) == [short]
    assert moves.due([long, short], {"d1": 513}, 0.1) == [long]
