"""An answer that has begun is continued: with what input, on which pods, for how long, and when it is given up."""

from typing import TypeVar

import msgspec
import pytest

from kvferry_router.flow import RequestFlow
from kvferry_router.flow_messages import (
    AbortLeg,
    Book,
    ClientGone,
    Computed,
    Effect,
    Event,
    FailAnswer,
    FinishAnswer,
    LegClosed,
    LegFrames,
    NeedPod,
    OpenLeg,
    PodChosen,
    Record,
    Release,
    Resumed,
    Send,
    Start,
    Tick,
)
from kvferry_router.flow_states import State
from kvferry_router.given import Given, IdBudget
from kvferry_wire.frames import Alive, Begun, End, Fail, FailKind, Frame, Prefilled, Tokens
from kvferry_wire.leg import ChoiceState
from kvferry_wire.limits import Limits

from .builders import make_end, make_handle, make_leg, make_prefilled, make_tokens

E = TypeVar("E")
LIMITS = Limits(resume_wait_s=10.0)


def make_flow(
    *,
    n: int = 1,
    stream: bool = True,
    limits: Limits = LIMITS,
    budget: IdBudget | None = None,
    deadline_s: float = 60.0,
) -> RequestFlow:
    leg = make_leg(n=n, stream=stream, max_tokens=64)
    return RequestFlow(leg, limits, deadline_s=deadline_s, accepted_at=0.0, budget=budget)


def run(flow: RequestFlow, *events: Event, now: float = 1.0) -> list[Effect]:
    return [effect for event in events for effect in flow.handle(event, now)]


def frames(attempt: int, *frames_: Frame) -> LegFrames:
    return LegFrames(attempt, frames_)


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def one(kind: type[E], effects: list[Effect]) -> E:
    found = of(kind, effects)
    assert len(found) == 1, f"{kind.__name__}: {found}"
    return found[0]


def assert_balanced(effects: list[Effect]) -> None:
    booked = [(effect.kind, effect.pod) for effect in of(Book, effects)]
    assert sorted(booked) == sorted((effect.kind, effect.pod) for effect in of(Release, effects))


def streaming(flow: RequestFlow, *ids: int) -> list[Effect]:
    """Decode alone on d1 has given these."""
    return run(flow, Start(None, "d1", "hash"), frames(0, Begun(cached_tokens=3), *(make_tokens(each) for each in ids)))


def test_the_next_leg_has_all_that_the_client_has() -> None:
    """Ids and characters per choice, same id, time, seed, tenant; the role was said; the deadline is what is left."""
    flow = make_flow(n=2)
    effects = streaming(flow, 5, 6)
    effects += run(flow, frames(0, Tokens(choice=1, ids=(7,), data=b"", chars=0)))
    effects += run(flow, LegClosed(0, "cut"), PodChosen("decode", "d2"), now=21.0)
    first, second = (effect.leg for effect in of(OpenLeg, effects))
    assert second.choices == (
        ChoiceState(emitted=(5, 6), chars_sent=2),
        ChoiceState(emitted=(7,), chars_sent=0),
    )
    assert second.format == msgspec.structs.replace(first.format, role_sent=True)
    assert (second.sampling, second.extras, second.prompt_ids) == (first.sampling, first.extras, first.prompt_ids)
    assert (second.attempt, second.deadline_ms, second.cached_tokens) == (1, 39_000, 3)
    assert (second.resumed, second.compat_hash) == ("dead", "hash")
    assert one(NeedPod, effects) == NeedPod("decode", frozenset({"d1"}), "hash", resume=True)
    assert of(AbortLeg, effects) == [AbortLeg(0, "d1")]


def test_the_answer_s_usage_is_that_of_the_leg_that_began_it() -> None:
    """What a later pod finds in its cache is no business of the client's."""
    flow = make_flow()
    effects = streaming(flow, 5)
    effects += run(flow, LegClosed(0, "cut"), PodChosen("decode", "d2"))
    effects += run(flow, frames(1, Begun(cached_tokens=8, recomputed="x"), make_tokens(6)), LegClosed(1, "cut"))
    effects += run(flow, PodChosen("decode", "d3"))
    assert [effect.leg.cached_tokens for effect in of(OpenLeg, effects)] == [0, 3, 3]
    assert of(OpenLeg, effects)[-1].leg.resumed == "dead, dead"


def test_prefill_s_usage_stays_when_decode_recomputes() -> None:
    """A handle that cannot be read changes where the prompt is computed, not what the client is told of it."""
    flow = make_flow()
    effects = run(flow, Start("p1", "d1"), frames(0, make_prefilled(7, handle=make_handle())))
    effects += run(flow, frames(1, Begun(cached_tokens=4, recomputed="lease_expired"), make_tokens(8)))
    effects += run(flow, LegClosed(1, "cut"), PodChosen("decode", "d2"))
    assert of(OpenLeg, effects)[-1].leg.cached_tokens == 4


def test_a_gap_is_told_from_the_last_of_one_leg_to_the_first_of_the_next() -> None:
    """Only new tokens (or the end) end it: signs of life do not."""
    flow = make_flow()
    streaming(flow, 5)
    run(flow, LegClosed(0, "cut"), PodChosen("decode", "d2"), now=2.0)
    assert of(Resumed, run(flow, frames(1, Alive(step=1)), now=3.0)) == []
    effects = run(flow, frames(1, make_tokens(6), make_tokens(7)), now=4.0)
    assert of(Resumed, effects) == [Resumed("dead", 3.0)]
    assert [type(effect) for effect in effects] == [Computed, Resumed, Send, Send]


def test_a_leg_that_was_given_up_adds_nothing() -> None:
    """Its late frames, its late end and its close come to nothing, also after the answer went on elsewhere."""
    flow = make_flow()
    streaming(flow, 5)
    run(flow, Tick(), PodChosen("decode", "d2"), now=6.0)
    late = (make_tokens(6), make_end(completion_tokens=2))
    assert run(flow, frames(0, *late), LegClosed(0, "cut"), now=6.1) == []
    assert [effect.data for effect in of(Send, run(flow, frames(1, make_tokens(6)), now=6.2))] == [b"data: {}\n\n"]
    assert flow.choices()[0].emitted == (5, 6)


def test_end_of_emitted_ids_alone_ends_the_answer() -> None:
    """The pod died after its last token and before its end: the next leg has nothing to compute."""
    flow = make_flow()
    effects = streaming(flow, 5, 6)
    effects += run(flow, LegClosed(0, "cut"), PodChosen("decode", "d2"))
    effects += run(flow, frames(1, make_end(completion_tokens=2)), LegClosed(1, "ended"))
    assert one(FinishAnswer, effects).data == b"data: [DONE]\n\n"
    assert one(Resumed, effects).cause == "dead"
    record = one(Record, effects)
    assert (record.outcome, record.legs, record.resumed, record.completion_tokens) == ("ok", 2, ("dead",), 2)
    assert_balanced(effects)


def test_an_end_that_is_here_is_not_resumed() -> None:
    """Whatever becomes of the leg behind its `End`, no other one is opened."""
    flow = make_flow()
    effects = streaming(flow, 5)
    effects += run(flow, frames(0, make_end()), LegClosed(0, "cut"))
    assert len(of(OpenLeg, effects)) == 1
    assert of(NeedPod, effects) == []
    assert one(Record, effects).outcome == "ok"


RETRYABLE: dict[str, tuple[Event, str]] = {
    "cut": (LegClosed(0, "cut"), "dead"),
    "ended": (LegClosed(0, "ended"), "dead"),
    "failed status": (LegClosed(0, "failed"), "failed"),
    **{
        kind: (frames(0, Fail(kind=kind, message="m")), cause)  # type: ignore[arg-type]
        for kind, cause in (
            ("internal", "failed"),
            ("draining", "draining"),
            ("busy", "busy"),
            ("cancelled", "failed"),
            ("invalid", "failed"),  # not the client's fault: its request was taken before
        )
    },
}


@pytest.mark.parametrize("how", RETRYABLE)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_each_retryable_end_of_a_leg_is_resumed(how: str, stream: bool) -> None:
    """Streaming or not, the tokens of the lost leg count."""
    event, cause = RETRYABLE[how]
    flow = make_flow(stream=stream)
    effects = run(flow, Start(None, "d1"), frames(0, make_tokens(5, data=b"data: {}\n\n" if stream else b"")))
    effects += run(flow, event, PodChosen("decode", "d2"))
    leg = of(OpenLeg, effects)[-1].leg
    assert (leg.choices[0].emitted, leg.resumed) == ((5,), cause)
    assert of(FailAnswer, effects) == []


@pytest.mark.parametrize("kind", ["deadline"])
def test_a_deadline_is_not_resumed(kind: FailKind) -> None:
    """No other pod has more time."""
    flow = make_flow()
    effects = streaming(flow, 5) + run(flow, frames(0, Fail(kind=kind, message="m")))
    assert of(NeedPod, effects) == []
    assert one(FailAnswer, effects).in_band


def test_a_pair_may_go_on_when_no_kv_waits_for_the_answer() -> None:
    """Prefill computes the prompt, picks nothing again, and decode goes on from the emitted ids."""
    flow = make_flow()
    effects = streaming(flow, 5, 6)
    effects += run(flow, LegClosed(0, "cut"), PodChosen("decode", "d2", "p1"))
    prefill = of(OpenLeg, effects)[-1]
    assert (prefill.kind, prefill.pod, prefill.leg.choices[0].emitted) == ("prefill", "p1", (5, 6))
    assert flow.state is State.PREFILLING
    handle = make_handle()
    effects += run(flow, frames(1, make_prefilled(5, handle=handle)))
    decode = of(OpenLeg, effects)[-1]
    assert (decode.kind, decode.leg.handle, decode.leg.choices[0].emitted) == ("decode", handle, (5, 6))
    assert not decode.leg.must_pull
    effects += run(flow, frames(2, make_tokens(7), make_end(completion_tokens=3)), LegClosed(2, "ended"))
    assert one(Record, effects).outcome == "ok"
    assert_balanced(effects)


def test_prefill_that_contradicts_the_answer_is_not_believed() -> None:
    """Its first token must be the one that the client has."""
    flow = make_flow()
    streaming(flow, 5)
    effects = run(flow, LegClosed(0, "cut"), PodChosen("decode", "d2", "p1"), frames(1, make_prefilled(9)))
    last = of(OpenLeg, effects)[-1]
    assert (last.kind, last.pod, last.leg.choices[0].emitted) == ("decode", "d2", (5,))


def test_kv_that_waits_is_used_by_the_next_pod_until_decode_has_given_a_token() -> None:
    """Before that the handle may be good; after it the lease is released, or of no use: it is withdrawn."""
    flow = make_flow()
    handle = make_handle()
    effects = run(flow, Start("p1", "d1", "hash"), frames(0, make_prefilled(7, handle=handle)))
    effects += run(flow, frames(1, Tokens(choice=0, ids=(), data=b"data: first\n\n", chars=1)), LegClosed(1, "cut"))
    assert of(NeedPod, effects) == [
        NeedPod("decode", frozenset({"d1"}), "hash", beside="p1", ferried=True, resume=True)
    ]
    effects = run(flow, PodChosen("decode", "d2"))
    assert one(OpenLeg, effects).leg.handle == handle
    effects = run(flow, frames(2, make_tokens(8)), LegClosed(2, "cut"))
    assert of(AbortLeg, effects) == [AbortLeg(2, "d2"), AbortLeg(0, "p1")]
    assert one(NeedPod, effects) == NeedPod("decode", frozenset({"d2"}), "hash", resume=True)


def test_without_a_pod_it_looks_again_and_takes_the_same_one_when_it_is_back() -> None:
    """Pauses grow to the longest; each look leaves out nobody who may be back."""
    flow = make_flow()
    streaming(flow, 5)
    effects = run(flow, LegClosed(0, "cut"), PodChosen("decode", None), now=2.0)
    assert one(NeedPod, effects).excluded == {"d1"}
    looks, now = [], 2.0
    for _ in range(7):
        due = flow.next_wakeup()
        assert due is not None
        looks.append(round(due - now, 6))
        now = due
        effects = run(flow, Tick(), now=now)
        assert one(NeedPod, effects).excluded == frozenset()
        run(flow, PodChosen("decode", None), now=now)
    assert looks == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    run(flow, Tick(), now=11.0)
    effects = run(flow, PodChosen("decode", "d1"), now=11.0)
    assert one(OpenLeg, effects).pod == "d1"


def test_the_wait_for_a_pod_ends_in_an_error_within_its_time() -> None:
    """The last look is at the end of the wait, and the failure says that the engine was lost."""
    flow = make_flow()
    streaming(flow, 5)
    effects = run(flow, LegClosed(0, "cut"), PodChosen("decode", None), now=2.0)
    while flow.state is not State.DONE:
        due = flow.next_wakeup()
        assert due is not None and due <= 12.0
        effects += run(flow, Tick(), now=due)
        effects += run(flow, PodChosen("decode", None), now=due)
    assert one(FailAnswer, effects).failure.code == "engine_lost"
    record = one(Record, effects)
    assert (record.outcome, record.gave_up, record.ended_at) == ("unavailable", "no_pod", 12.0)


def test_a_leg_that_was_taken_and_lost_again_begins_a_wait_of_its_own() -> None:
    """A request without a token, cut off twice by the one pod there is: it looks again, long after the first cut."""
    flow = make_flow()
    wait = Limits().capacity_wait_s
    run(flow, Start(None, "d1"))
    run(flow, LegClosed(0, "cut"), PodChosen("decode", None), now=2.0)
    run(flow, Tick(), PodChosen("decode", "d1"), now=2.1)
    late = 2.0 + 2 * wait
    assert of(FailAnswer, run(flow, LegClosed(1, "cut"), PodChosen("decode", None), now=late)) == []
    assert one(OpenLeg, run(flow, Tick(), PodChosen("decode", "d1"), now=late + 0.2)).pod == "d1"


def test_a_pod_that_takes_no_leg_begins_no_wait_of_its_own() -> None:
    """Refused again and again, a request without a token fails within the wait that the first refusal began."""
    flow = make_flow()
    wait = Limits().capacity_wait_s
    run(flow, Start(None, "d1"))
    run(flow, LegClosed(0, "refused"), PodChosen("decode", None), now=2.0)
    run(flow, Tick(), PodChosen("decode", "d1"), now=2.1)
    effects = run(flow, LegClosed(1, "refused"), PodChosen("decode", None), now=2.0 + 2 * wait)
    assert one(FailAnswer, effects).failure.code == "engine_lost"


def test_the_deadline_ends_a_wait() -> None:
    """It is the request's own deadline that counts, not the wait for a pod."""
    flow = make_flow(deadline_s=5.0)
    streaming(flow, 5)
    run(flow, LegClosed(0, "cut"), PodChosen("decode", None), now=4.95)
    assert flow.next_wakeup() == 5.0
    effects = run(flow, Tick(), now=5.0)
    assert one(FailAnswer, effects).failure.code == "deadline_exceeded"


def test_a_client_that_leaves_during_a_wait_leaves_nothing() -> None:
    """There is no leg to abort, and nothing is booked."""
    flow = make_flow()
    effects = streaming(flow, 5)
    effects += run(flow, LegClosed(0, "cut"), PodChosen("decode", None), ClientGone())
    assert one(Record, effects).outcome == "cancelled"
    assert_balanced(effects)


def test_full_pods_are_waited_for_once_the_answer_has_begun() -> None:
    """Being refused for want of room costs time and no more; before there is a token it is told at once."""
    flow = make_flow()
    streaming(flow, 5)
    run(flow, LegClosed(0, "cut"), PodChosen("decode", "d2"), now=2.0)
    attempt, now = 1, 2.0
    while now < 10.0:
        effects = run(flow, frames(attempt, Fail(kind="busy", message="full")), PodChosen("decode", None), now=now)
        assert of(FailAnswer, effects) == []
        due = flow.next_wakeup()
        assert due is not None
        now = due
        run(flow, Tick(), PodChosen("decode", "d2"), now=now)
        attempt += 1
    effects = run(flow, frames(attempt, make_tokens(6), make_end(completion_tokens=2)), LegClosed(attempt, "ended"))
    assert one(Record, effects).resumed == ("dead",)


def test_losses_without_a_token_between_them_end_at_the_third() -> None:
    """A request that ends whatever computes it is not carried round the pool, however many pods are left."""
    flow = make_flow()
    effects = streaming(flow, 5)
    for number in range(3):
        effects += run(flow, LegClosed(number, "cut"), PodChosen("decode", f"d{number + 2}"), now=2.0 + number)
    effects += run(flow, LegClosed(3, "cut"), now=6.0)
    failure = one(FailAnswer, effects)
    assert (failure.failure.code, failure.in_band) == ("engine_lost_repeatedly", True)
    assert one(Record, effects).gave_up == "barren"


@pytest.mark.parametrize("how", ["stalled", "failed"])
def test_stalls_and_failures_count_as_losses_and_refused_connections_do_not(how: str) -> None:
    """A pod that was never reached was not ended by the request."""
    flow = make_flow()
    effects = streaming(flow, 5)
    effects += run(flow, LegClosed(0, "cut"), PodChosen("decode", "d2"))
    for attempt in range(1, 6):
        effects += run(flow, LegClosed(attempt, "refused"), PodChosen("decode", "d2"))
    assert of(FailAnswer, effects) == []
    for attempt in range(6, 9):
        if how == "stalled":
            effects += run(flow, Tick(), now=6.0 * (attempt - 4))
        else:
            effects += run(flow, frames(attempt, Fail(kind="internal", message="m")))
        if flow.state is State.CHOOSING_DECODE:
            effects += run(flow, PodChosen("decode", "d3"), now=6.0 * (attempt - 4))
    assert one(Record, effects).gave_up == "barren"


def test_prefill_pods_that_are_lost_count_too() -> None:
    """Two prefill pods and a decode pod: the request has taken down three."""
    flow = make_flow()
    effects = run(flow, Start("p1", "d1"), LegClosed(0, "cut"), PodChosen("prefill", "p2"), LegClosed(1, "cut"))
    effects += run(flow, LegClosed(2, "cut"))
    assert one(Record, effects).gave_up == "barren"
    assert one(FailAnswer, effects).failure.status == 500


def test_losses_with_tokens_between_them_are_bounded_too() -> None:
    """An answer in endless interruptions ends after so many legs."""
    flow = make_flow(limits=msgspec.structs.replace(LIMITS, leg_losses=5))
    effects = run(flow, Start(None, "d1"))
    for number in range(5):
        effects += run(flow, frames(number, make_tokens(number)), LegClosed(number, "cut"))
        if flow.state is State.CHOOSING_DECODE:
            effects += run(flow, PodChosen("decode", f"d{number + 2}"))
    assert one(Record, effects).gave_up == "losses"
    assert len(of(OpenLeg, effects)) == 5


def test_a_pod_that_broke_the_protocol_is_never_taken_again() -> None:
    """Also when a later look leaves out nobody else."""
    flow = make_flow(stream=False)
    run(flow, Start(None, "d1"), frames(0, make_tokens(5, data=b"")), LegClosed(0, "cut"), PodChosen("decode", "d2"))
    run(flow, frames(1, make_tokens(-1, data=b"")), PodChosen("decode", None))
    due = flow.next_wakeup()
    assert due is not None
    assert one(NeedPod, run(flow, Tick(), now=due)).excluded == {"d2"}
    assert flow.choices()[0].emitted == (5,)


def test_what_a_resumed_leg_gave_before_it_broke_the_protocol_is_taken_back_if_the_client_has_none_of_it() -> None:
    """The client has bytes of an earlier leg: those stand."""
    flow = make_flow()
    streaming(flow, 5)
    run(flow, LegClosed(0, "cut"), PodChosen("decode", "d2"))
    effects = run(flow, frames(1, Tokens(choice=0, ids=(6,), data=b""), make_end(completion_tokens=9)))
    assert of(FailAnswer, effects) == []
    assert one(OpenLeg, run(flow, PodChosen("decode", "d3"))).leg.choices[0].emitted == (5,)


def test_ids_beyond_the_room_for_them_are_counted_and_not_kept() -> None:
    """The answer goes on; it cannot be resumed; its room is free again."""
    budget = IdBudget(Limits(resume_ids=3))
    flow = make_flow(budget=budget)
    effects = streaming(flow, 5, 6, 7)
    assert budget.held == 3
    effects += run(flow, frames(0, make_tokens(8)))
    assert budget.held == 0
    effects += run(flow, LegClosed(0, "cut"))
    assert one(FailAnswer, effects).in_band
    record = one(Record, effects)
    assert (record.gave_up, record.completion_tokens) == ("memory", 4)


def test_prefill_s_tokens_are_kept_whatever_the_room() -> None:
    """An answer cannot begin without them."""
    budget = IdBudget(Limits(resume_ids=0))
    flow = make_flow(n=2, budget=budget)
    effects = run(flow, Start("p1", "d1"), frames(0, Prefilled(first=(7, 8), cached_tokens=0, handle=None)))
    assert of(OpenLeg, effects)[-1].leg.choices == (ChoiceState(emitted=(7,)), ChoiceState(emitted=(8,)))
    run(flow, ClientGone())
    assert budget.held == 0


def test_room_is_given_back_once_whatever_happens_to_what_was_given() -> None:
    """Rewound, forgotten or over: the sum is what running answers keep."""
    budget = IdBudget(Limits(resume_ids=100))
    given = Given((ChoiceState(), ChoiceState()), Limits(resume_ids_per_request=6), budget)
    assert given.first((1, 2))
    given.mark()
    assert given.take(0, (3, 4), 2)
    assert not given.take(1, (2**32,), 0)
    assert budget.held == 4
    given.rewind()
    assert (budget.held, given.tokens, given.states()[0]) == (2, 2, ChoiceState(emitted=(1,)))
    assert given.take(1, (5, 6, 7, 8), 4)
    assert budget.held == 6
    assert given.take(0, (9,), 1)
    assert (given.kept, budget.held, given.tokens, given.count(1)) == (False, 0, 7, 5)
    given.rewind()
    given.release()
    assert budget.held == 0


def test_ids_that_cannot_be_any_are_a_protocol_error() -> None:
    """They could not be sent on as input."""
    for ids in ((-1,), (2**32,)):
        flow = make_flow(stream=False)
        effects = run(flow, Start(None, "d1"), frames(0, Tokens(choice=0, ids=ids, data=b"")))
        assert of(NeedPod, effects) != []
        assert flow.choices()[0].emitted == ()


def test_whole_answer_of_two_pods_is_one_body() -> None:
    """Not streamed: nothing went out before, everything comes with the end."""
    flow = make_flow(stream=False)
    effects = run(flow, Start(None, "d1"), frames(0, make_tokens(5, data=b"")), LegClosed(0, "cut"))
    effects += run(flow, PodChosen("decode", "d2"), frames(1, make_tokens(6, data=b"")))
    end = End(data=b"{}", finish=("stop",), completion_tokens=2, cached_tokens=0)
    effects += run(flow, frames(1, end), LegClosed(1, "ended"))
    assert of(Send, effects) == []
    assert one(FinishAnswer, effects).data == b"{}"
