"""What a service asks for when KV cannot be ferried: recompute it, try another prefill pod first, or fail."""

from typing import TypeVar, get_args

import pytest

from kvferry_router.flow import RequestFlow
from kvferry_router.flow_messages import (
    AbortLeg,
    Book,
    Effect,
    Event,
    FailAnswer,
    FailurePolicy,
    Ferried,
    LegClosed,
    LegFrames,
    NeedPod,
    OpenLeg,
    PodChosen,
    PodFailed,
    Record,
    Release,
    Start,
    Tick,
)
from kvferry_router.flow_states import State
from kvferry_wire.frames import Begun, Fail, Frame
from kvferry_wire.limits import Limits

from .builders import make_end, make_handle, make_leg, make_prefilled, make_tokens

E = TypeVar("E")
POLICIES: tuple[FailurePolicy, ...] = get_args(FailurePolicy)
BUSY = Fail(kind="busy", message="full")
NOT_FERRIED = Fail(kind="transfer", message="not ferried", param="peer_dead")


def make_flow(policy: FailurePolicy) -> RequestFlow:
    return RequestFlow(make_leg(), Limits(), deadline_s=40.0, accepted_at=0.0, policy=policy)


def run(flow: RequestFlow, *events: Event, now: float = 1.0) -> list[Effect]:
    return [effect for event in events for effect in flow.handle(event, now)]


def frames(attempt: int, *frames_: Frame) -> LegFrames:
    return LegFrames(attempt, frames_)


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def one(kind: type[E], effects: list[Effect]) -> E:
    (found,) = of(kind, effects)
    return found


def assert_over(flow: RequestFlow, effects: list[Effect]) -> Record:
    assert flow.state is State.DONE
    booked = [(effect.kind, effect.pod) for effect in of(Book, effects)]
    assert sorted(booked) == sorted((effect.kind, effect.pod) for effect in of(Release, effects))
    return one(Record, effects)


def finish(flow: RequestFlow, attempt: int, tokens: int = 1) -> list[Effect]:
    effects = run(flow, frames(attempt, Begun(cached_tokens=0), make_tokens(*range(8, 8 + tokens))))
    end = make_end(completion_tokens=flow._answer.given.tokens)
    return effects + run(flow, frames(attempt, end), LegClosed(attempt, "ended"))


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_is_told_whether_it_may_compute_the_prompt(policy: FailurePolicy) -> None:
    """Only a leg that brings a handle insists on it, and only where the service does not ask for recompute."""
    flow = make_flow(policy)
    effects = run(flow, Start("p1", "d1"), frames(0, make_prefilled(7, handle=make_handle())))
    assert [effect.leg.must_pull for effect in of(OpenLeg, effects)] == [False, policy != "recompute"]
    effects = run(make_flow(policy), Start(None, "d1"))
    assert not one(OpenLeg, effects).leg.must_pull
    effects = run(make_flow(policy), Start("p1", "d1"), frames(0, make_prefilled(7, handle=None)))
    assert not of(OpenLeg, effects)[-1].leg.must_pull


def test_fail_ends_the_request_when_its_kv_is_not_ferried() -> None:
    """One error of its own; the lease is withdrawn, the pair's failure is told, and neither pod is blamed."""
    flow = make_flow("fail")
    effects = run(flow, Start("p1", "d1"), frames(0, make_prefilled(7, handle=make_handle())), frames(1, NOT_FERRIED))
    failure = one(FailAnswer, effects).failure
    assert (failure.status, failure.code, failure.retry_after_s) == (503, "transfer_failed", 1)
    assert of(Ferried, effects) == [Ferried("p1", "d1", "peer_dead")]
    assert of(PodFailed, effects) == []
    assert of(AbortLeg, effects) == [AbortLeg(0, "p1")]
    assert assert_over(flow, effects).gave_up == "transfer"


def test_retry_asks_another_prefill_pod_and_picks_nothing_again() -> None:
    """The first token stays; the same decode pod gets the other's KV; in the end decode computes the prompt."""
    flow = make_flow("retry")
    effects = run(flow, Start("p1", "d1", "h"), frames(0, make_prefilled(7, handle=make_handle(1))))
    effects += run(flow, frames(1, NOT_FERRIED))
    assert one(NeedPod, effects) == NeedPod("prefill", frozenset({"p1", "d1"}), "h", beside="d1")
    effects += run(flow, PodChosen("prefill", "p2"))
    again = of(OpenLeg, effects)[-1]
    assert (again.kind, again.pod, again.leg.choices[0].emitted) == ("prefill", "p2", (7,))
    effects += run(flow, frames(2, make_prefilled(7, handle=make_handle(2))))
    leg = of(OpenLeg, effects)[-1].leg
    assert leg.handle is not None
    assert (leg.handle.lease_id, leg.choices[0].emitted, leg.must_pull) == (2, (7,), True)
    effects += run(flow, frames(3, NOT_FERRIED), PodChosen("prefill", None))
    alone = of(OpenLeg, effects)[-1]
    assert (alone.kind, alone.leg.handle, alone.leg.must_pull, alone.leg.recompute) == (
        *("decode", None, False),
        "peer_dead",
    )
    effects += finish(flow, 4)
    record = assert_over(flow, effects)
    assert (record.outcome, record.path, record.recomputed) == ("ok", "recomputed", "peer_dead")
    assert of(AbortLeg, effects) == [AbortLeg(0, "p1"), AbortLeg(2, "p2")]


def test_retry_is_bounded() -> None:
    """So many prefill legs, then decode does it."""
    flow = make_flow("retry")
    effects = run(flow, Start("p1", "d1"))
    for number in range(3):
        effects += run(flow, frames(2 * number, make_prefilled(7, handle=make_handle())))
        effects += run(flow, frames(2 * number + 1, NOT_FERRIED))
        if flow.state is State.CHOOSING_PREFILL:
            effects += run(flow, PodChosen("prefill", f"p{number + 2}"))
    assert [effect.kind for effect in of(OpenLeg, effects)].count("prefill") == 3
    last = of(OpenLeg, effects)[-1]
    assert (last.kind, last.leg.handle) == ("decode", None)


@pytest.mark.parametrize(("policy", "legs"), [("recompute", 2), ("retry", 3), ("fail", 3)])
def test_prefill_that_is_lost_is_tried_elsewhere(policy: FailurePolicy, legs: int) -> None:
    """Nothing was ferried yet: another prefill pod; only `fail` ends in an error when all were lost."""
    flow = make_flow(policy)
    effects = run(flow, Start("p1", "d1"))
    for number in range(legs):
        effects += run(flow, LegClosed(number, "refused"))
        if flow.state is State.CHOOSING_PREFILL:
            effects += run(flow, PodChosen("prefill", f"p{number + 2}"))
    assert [effect.kind for effect in of(OpenLeg, effects)].count("prefill") == legs
    if policy == "fail":
        assert one(FailAnswer, effects).failure.code == "transfer_failed"
        assert_over(flow, effects)
    else:
        assert of(OpenLeg, effects)[-1].kind == "decode"


def test_recompute_does_not_wait_for_prefill_pods_that_are_full() -> None:
    """Another one, then decode alone: the prompt is computed at once."""
    flow = make_flow("recompute")
    effects = run(flow, Start("p1", "d1"), frames(0, BUSY), PodChosen("prefill", None))
    last = of(OpenLeg, effects)[-1]
    assert (last.kind, last.leg.recompute) == ("decode", "prefill_busy")


@pytest.mark.parametrize("policy", ["retry", "fail"])
def test_full_prefill_pods_are_waited_for_within_prefill_s_share(policy: FailurePolicy) -> None:
    """Leases that hold their share end: prefill is asked again, and gets the request when it has room."""
    flow = make_flow(policy)
    effects = run(flow, Start("p1", "d1"), frames(0, BUSY), PodChosen("prefill", None), now=0.0)
    assert flow.state is State.WAITING_FOR_PREFILL
    now = flow.next_wakeup()
    assert now == 0.1
    effects += run(flow, Tick(), now=now)
    assert of(NeedPod, effects)[-1].excluded == {"d1"}
    effects += run(flow, PodChosen("prefill", "p1"), now=now)
    effects += run(flow, frames(1, make_prefilled(7, handle=make_handle())), now=now)
    effects += finish(flow, 2)
    record = assert_over(flow, effects)
    assert (record.outcome, record.legs) == ("ok", 3)


@pytest.mark.parametrize("policy", ["retry", "fail"])
def test_prefill_pods_that_stay_full_end_the_wait(policy: FailurePolicy) -> None:
    """A quarter of the deadline: then decode computes the prompt, or the client hears that the service is full."""
    flow = make_flow(policy)
    effects = run(flow, Start("p1", "d1"), frames(0, BUSY), PodChosen("prefill", None), now=0.0)
    attempt = 1
    while flow.state is State.WAITING_FOR_PREFILL:
        now = flow.next_wakeup()
        assert now is not None and now <= 10.0
        effects += run(flow, Tick(), PodChosen("prefill", "p1"), frames(attempt, BUSY), now=now)
        attempt += 1
        if flow.state is State.CHOOSING_PREFILL:
            effects += run(flow, PodChosen("prefill", None), now=now)
    if policy == "fail":
        assert one(FailAnswer, effects).failure.status == 429
        assert_over(flow, effects)
    else:
        assert of(OpenLeg, effects)[-1].kind == "decode"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_answer_is_computed_whatever_the_policy(policy: FailurePolicy) -> None:
    """The policy is about ferrying a prompt; an answer that has begun is worth more than that."""
    flow = make_flow(policy)
    run(flow, Start(None, "d1"), frames(0, make_tokens(5)), LegClosed(0, "cut"))
    effects = run(flow, PodChosen("decode", "d2", "p1"), frames(1, BUSY))
    last = of(OpenLeg, effects)[-1]
    assert (last.kind, last.pod, last.leg.must_pull, last.leg.handle) == ("decode", "d2", False, None)


def test_each_transfer_s_result_is_told_once() -> None:
    """With the leg's first word about it; a leg that is lost before says nothing of its pair."""
    flow = make_flow("recompute")
    effects = run(flow, Start("p1", "d1"), frames(0, make_prefilled(7, handle=make_handle())), LegClosed(1, "cut"))
    assert of(Ferried, effects) == []
    effects = run(flow, PodChosen("decode", "d2"), frames(2, Begun(cached_tokens=0), Begun(cached_tokens=0)))
    assert of(Ferried, effects) == [Ferried("p1", "d2", "")]
    effects = run(flow, frames(2, make_tokens(8)), LegClosed(2, "cut"), PodChosen("decode", "d1"))
    effects += run(flow, frames(3, Begun(cached_tokens=0)))
    assert of(Ferried, effects) == []
