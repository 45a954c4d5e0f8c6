"""The flow's answer to each way in which a leg fails, before and after the client has bytes."""

from typing import TypeVar

import pytest

from kvferry_router.flow import RequestFlow
from kvferry_router.flow_messages import (
    AbortLeg,
    Book,
    ClientGone,
    CloseCause,
    Effect,
    Event,
    FailAnswer,
    FinishAnswer,
    FinishLeg,
    LegClosed,
    LegFrames,
    NeedPod,
    OpenLeg,
    PodChosen,
    PodFailed,
    Record,
    Release,
    Send,
    Start,
    Tick,
)
from kvferry_router.flow_states import State
from kvferry_wire.frames import Alive, End, Fail, FailKind, Frame, Handoff, Prefilled, Tokens
from kvferry_wire.limits import Limits

from .builders import make_end, make_handle, make_leg, make_prefilled, make_tokens

E = TypeVar("E")


def make_flow(*, n: int = 1, stream: bool = True, max_tokens: int = 16, deadline_s: float = 60.0) -> RequestFlow:
    return RequestFlow(
        make_leg(n=n, stream=stream, max_tokens=max_tokens), Limits(), deadline_s=deadline_s, accepted_at=0.0
    )


def run(flow: RequestFlow, *events: Event, now: float = 1.0) -> list[Effect]:
    return [effect for event in events for effect in flow.handle(event, now)]


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def one(kind: type[E], effects: list[Effect]) -> E:
    found = of(kind, effects)
    assert len(found) == 1, f"{kind.__name__}: {found}"
    return found[0]


def assert_balanced(effects: list[Effect]) -> None:
    """Each booking is released exactly once, and never before it was made."""
    open_: set[tuple[str, str]] = set()
    for effect in effects:
        if isinstance(effect, Book):
            assert (effect.kind, effect.pod) not in open_
            open_.add((effect.kind, effect.pod))
        elif isinstance(effect, Release):
            open_.remove((effect.kind, effect.pod))
    assert not open_


def test_disaggregated_answer_passes_through_both_pods() -> None:
    """Prefill's first token and handle become the decode leg's input, and decode's bytes go on as they are."""
    flow = make_flow()
    handle = make_handle()
    effects = run(
        flow,
        Start("p1", "d1"),
        LegFrames(0, (Alive(step=1), make_prefilled(7, handle=handle))),
        LegFrames(1, (Tokens(choice=0, ids=(), data=b"data: a\n\n", chars=1),)),
        LegFrames(1, (make_tokens(8, data=b"data: b\n\n"),)),
        LegFrames(1, (make_end(data=b"data: [DONE]\n\n", completion_tokens=2),)),
        LegClosed(1, "ended"),
    )
    prefill, decode = of(OpenLeg, effects)
    assert (prefill.kind, prefill.pod, prefill.leg.attempt, prefill.leg.handle) == ("prefill", "p1", 0, None)
    assert (decode.kind, decode.pod, decode.leg.attempt, decode.leg.handle) == ("decode", "d1", 1, handle)
    assert decode.leg.choices[0].emitted == (7,)
    assert decode.leg.cached_tokens == 4
    assert decode.leg.recompute == ""
    assert [effect.data for effect in of(Send, effects)] == [b"data: a\n\n", b"data: b\n\n"]
    finish = one(FinishAnswer, effects)
    assert (finish.data, finish.path) == (b"data: [DONE]\n\n", "disaggregated")
    assert of(AbortLeg, effects) == []
    assert of(FinishLeg, effects) == [FinishLeg(0), FinishLeg(1)]
    record = one(Record, effects)
    assert (record.outcome, record.path, record.legs, record.completion_tokens) == ("ok", "disaggregated", 2, 2)
    assert_balanced(effects)


PREFILL_FAULTS: dict[str, tuple[Event, str]] = {
    "busy frame": (LegFrames(0, (Fail(kind="busy", message="full"),)), "prefill_busy"),
    "draining frame": (LegFrames(0, (Fail(kind="draining", message="draining"),)), "prefill_draining"),
    "engine failure": (LegFrames(0, (Fail(kind="internal", message="failed"),)), "prefill_failed"),
    "cut": (LegClosed(0, "cut"), "prefill_dead"),
    "ended without a word": (LegClosed(0, "ended"), "prefill_dead"),
    "refused": (LegClosed(0, "refused"), "prefill_dead"),
    "garbage": (LegClosed(0, "garbage"), "prefill_protocol"),
    "http 429": (LegClosed(0, "busy"), "prefill_busy"),
    "http 500": (LegClosed(0, "failed"), "prefill_failed"),
    "tokens from prefill": (LegFrames(0, (make_tokens(1),)), "prefill_protocol"),
    "end from prefill": (LegFrames(0, (make_end(),)), "prefill_protocol"),
    "wrong number of choices": (LegFrames(0, (make_prefilled(1, 2),)), "prefill_protocol"),
}


OVER_AT_THE_POD = {"busy frame", "draining frame", "engine failure", "http 429", "http 503"}


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_failed_prefill_is_tried_once_elsewhere_then_decode_goes_alone(fault: str) -> None:
    """The failed pod's booking is released before the next choice, which excludes it; the second failure ends it."""
    event, reason = PREFILL_FAULTS[fault]
    flow = make_flow()
    effects = run(flow, Start("p1", "d1"), event)
    need = one(NeedPod, effects)
    assert need == NeedPod("prefill", frozenset({"p1", "d1"}), beside="d1")
    assert effects.index(Release("prefill", "p1")) < effects.index(need)
    over = fault in OVER_AT_THE_POD
    assert of(AbortLeg, effects) == ([] if over else [AbortLeg(0, "p1")])
    assert of(FinishLeg, effects) == ([FinishLeg(0)] if over else [])

    effects += run(flow, PodChosen("prefill", "p2"), LegClosed(1, "cut"))
    last = of(OpenLeg, effects)[-1]
    assert (last.kind, last.pod, last.leg.attempt) == ("decode", "d1", 2)
    assert last.leg.recompute == "prefill_dead"
    assert last.leg.handle is None
    assert last.leg.choices[0].emitted == ()

    effects += run(flow, LegFrames(2, (make_tokens(7), make_end())), LegClosed(2, "ended"))
    record = one(Record, effects)
    assert (record.outcome, record.path, record.recomputed) == ("ok", "recomputed", "prefill_dead")
    assert_balanced(effects)
    del reason


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_decode_is_told_why_prefill_failed(fault: str) -> None:
    """With no other prefill pod decode computes the prompt, and its leg says why."""
    event, reason = PREFILL_FAULTS[fault]
    effects = run(make_flow(), Start("p1", "d1"), event, PodChosen("prefill", None))
    leg = of(OpenLeg, effects)[-1]
    assert (leg.kind, leg.leg.recompute) == ("decode", reason)
    # The decode pod is booked anew, now with the prompt's work.
    assert [effect for effect in of(Book, effects) if effect.kind == "decode"] == [
        Book("decode", "d1", computes=False),
        Book("decode", "d1", computes=True),
    ]


def test_silent_prefill_is_dead_after_the_stall_timeout() -> None:
    """`Alive` keeps a leg; five seconds without a frame end it, and not a moment earlier."""
    flow = make_flow()
    run(flow, Start("p1", "d1"), now=0.0)
    assert flow.next_wakeup() == 5.0
    run(flow, LegFrames(0, (Alive(step=1),)), now=4.0)
    assert flow.next_wakeup() == 9.0
    assert run(flow, Tick(), now=8.9) == []
    effects = run(flow, Tick(), now=9.0)
    assert of(PodFailed, effects) == [PodFailed("p1", "prefill", "stalled")]


def test_prefill_gets_a_share_of_the_deadline_only() -> None:
    """A prefill leg that lives but does not end by its share is given up; the rest is decode's."""
    flow = make_flow(deadline_s=8.0)
    effects = run(flow, Start("p1", "d1"), now=0.0)
    assert one(OpenLeg, effects).leg.deadline_ms == 2000
    effects += run(flow, LegFrames(0, (Alive(step=1),)), now=1.5)
    effects += run(flow, Tick(), now=2.0)
    effects += run(flow, PodChosen("prefill", None), now=2.0)
    leg = of(OpenLeg, effects)[-1].leg
    assert (leg.recompute, leg.deadline_ms) == ("prefill_deadline", 6000)
    assert of(PodFailed, effects) == []


DECODE_FAULTS: dict[str, tuple[Event, int]] = {
    "busy frame": (LegFrames(0, (Fail(kind="busy", message="full"),)), 429),
    "draining frame": (LegFrames(0, (Fail(kind="draining", message="draining"),)), 503),
    "engine failure": (LegFrames(0, (Fail(kind="internal", message="failed"),)), 500),
    "cut": (LegClosed(0, "cut"), 503),
    "ended without End": (LegClosed(0, "ended"), 503),
    "refused": (LegClosed(0, "refused"), 503),
    "garbage": (LegClosed(0, "garbage"), 502),
    "http 429": (LegClosed(0, "busy"), 429),
    "http 503": (LegClosed(0, "draining"), 503),
    "http 500": (LegClosed(0, "failed"), 500),
    "foreign choice": (LegFrames(0, (make_tokens(1, choice=3),)), 502),
    "negative choice": (LegFrames(0, (make_tokens(1, choice=-1),)), 502),
    "more tokens than asked for": (LegFrames(0, (make_tokens(*range(17)),)), 502),
    "prefilled from decode": (LegFrames(0, (make_prefilled(1),)), 502),
    "handoff": (LegFrames(0, (Handoff(handle=make_handle()),)), 502),
    "end of other choices": (LegFrames(0, (make_end(n=2, completion_tokens=0),)), 502),
    "end that counts tokens which never came": (LegFrames(0, (make_end(completion_tokens=7),)), 502),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("fault", DECODE_FAULTS)
def test_decode_that_fails_before_the_first_byte_is_tried_elsewhere(fault: str, stream: bool) -> None:
    """Another decode pod, without the failed one; with none left, for a moment, an error that says whether to retry."""
    event, status = DECODE_FAULTS[fault]
    flow = make_flow(stream=stream)
    effects = run(flow, Start(None, "d1"), event)
    need = one(NeedPod, effects)
    assert need == NeedPod("decode", frozenset({"d1"}))
    assert effects.index(Release("decode", "d1")) < effects.index(need)
    effects += run(flow, PodChosen("decode", None))
    assert (flow.state is State.DONE) == (status == 429)  # a full service is told as such at once
    if flow.state is not State.DONE:
        assert flow.next_wakeup() == 1.1
        effects += run(flow, Tick(), PodChosen("decode", None), now=1.75)
    fail = one(FailAnswer, effects)
    assert (fail.failure.status, fail.in_band) == (status, False)
    assert (fail.failure.retry_after_s is not None) == (status in (429, 503))
    assert_balanced(effects)


@pytest.mark.parametrize("fault", DECODE_FAULTS)
def test_decode_that_fails_after_the_first_byte_ends_in_an_error_event_when_no_pod_is_left(fault: str) -> None:
    """No clean end: the error goes into the stream, once no pod has gone on with it in time."""
    event, status = DECODE_FAULTS[fault]
    flow = make_flow()
    effects = run(flow, Start(None, "d1"), LegFrames(0, (make_tokens(5),)), event)
    assert of(FailAnswer, effects) == [] or status == 502  # a pod that broke the protocol is not believed
    if flow.state is not State.DONE:
        effects += run(flow, PodChosen("decode", None), now=2.0)
        effects += run(flow, Tick(), PodChosen("decode", None), now=40.0)
    fail = one(FailAnswer, effects)
    assert (fail.failure.status, fail.in_band) == (status, True)
    assert of(FinishAnswer, effects) == []
    over = fault in OVER_AT_THE_POD
    assert of(AbortLeg, effects) == ([] if over else [AbortLeg(0, "d1")])
    assert of(FinishLeg, effects) == ([FinishLeg(0)] if over else [])
    assert_balanced(effects)


def test_second_decode_pod_gets_what_was_emitted_as_input() -> None:
    """Ids recorded from a leg that died are input of the next: nothing is picked again."""
    flow = make_flow(stream=False)
    handle = make_handle()
    effects = run(
        flow,
        Start("p1", "d1"),
        LegFrames(0, (make_prefilled(7, handle=handle),)),
        LegFrames(1, (make_tokens(8, 9, data=b""),)),
        LegClosed(1, "cut"),
        PodChosen("decode", "d2"),
    )
    leg = of(OpenLeg, effects)[-1]
    assert (leg.pod, leg.leg.choices[0].emitted, leg.leg.handle) == ("d2", (7, 8, 9), None)
    # Decode had made use of the lease: it is of no use to another pod.
    assert of(AbortLeg, effects) == [AbortLeg(1, "d1"), AbortLeg(0, "p1")]
    effects += run(flow, LegFrames(2, (make_end(data=b"{}", completion_tokens=3),)), LegClosed(2, "ended"))
    assert one(FinishAnswer, effects).data == b"{}"
    assert_balanced(effects)


def test_decode_attempts_are_capped() -> None:
    """A request is not carried round a whole pool of failing pods."""
    flow = make_flow()
    effects = run(flow, Start(None, "d1"), LegClosed(0, "busy"))
    effects += run(flow, PodChosen("decode", "d2"), LegClosed(1, "cut"))
    effects += run(flow, PodChosen("decode", "d3"), LegClosed(2, "cut"))
    assert len(of(OpenLeg, effects)) == 3
    assert one(FailAnswer, effects).failure.status == 503


@pytest.mark.parametrize("kind", ["invalid", "deadline"])
def test_what_no_other_pod_can_cure_is_not_tried_again(kind: FailKind) -> None:
    """The client's own fault and a passed deadline end the request at once."""
    effects = run(make_flow(), Start(None, "d1"), LegFrames(0, (Fail(kind=kind, message="top_p", param="top_p"),)))
    assert of(NeedPod, effects) == []
    failure = one(FailAnswer, effects).failure
    assert failure.status == {"invalid": 400, "deadline": 504}[kind]
    assert of(PodFailed, effects) == []  # a 4xx never counts against a pod
    if kind == "invalid":
        assert (failure.message, failure.param) == ("top_p", "top_p")


@pytest.mark.parametrize("kind", ["busy", "draining", "internal", "cancelled", "deadline", "invalid"])
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_leg_that_says_it_failed_is_not_aborted(where: str, kind: FailKind) -> None:
    """The pod has ended it already: an abort would only leave a tombstone there."""
    start = Start("p1", "d1") if where == "prefill" else Start(None, "d1")
    effects = run(make_flow(), start, LegFrames(0, (Fail(kind=kind, message="no"),)))
    assert of(AbortLeg, effects) == []
    assert of(FinishLeg, effects) == [FinishLeg(0)]


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_invalid_from_a_pod_reaches_the_client_as_it_is(where: str) -> None:
    """Message and parameter of the pod's refusal are the client's."""
    start = Start("p1", "d1") if where == "prefill" else Start(None, "d1")
    effects = run(make_flow(), start, LegClosed(0, "invalid", message="too long", param="messages"))
    failure = one(FailAnswer, effects).failure
    assert (failure.status, failure.message, failure.param) == (400, "too long", "messages")


TRAILERS: dict[str, Frame] = {
    "tokens": make_tokens(1),
    "second end": make_end(),
    "alive": Alive(step=9),
    "fail": Fail(kind="internal", message="x"),
}


@pytest.mark.parametrize("trailer", TRAILERS)
@pytest.mark.parametrize("together", [True, False], ids=["one read", "two reads"])
def test_frame_after_end_is_a_protocol_error(trailer: str, together: bool) -> None:
    """Whatever follows `End` makes the answer doubtful: an error in place of the end, however the bytes arrive."""
    flow = make_flow()
    frames = (make_end(), TRAILERS[trailer])
    batches = [frames] if together else [(frame,) for frame in frames]
    effects = run(flow, Start(None, "d1"), LegFrames(0, (make_tokens(5),)))
    effects += run(flow, *(LegFrames(0, batch) for batch in batches))
    assert of(FinishAnswer, effects) == []
    fail = one(FailAnswer, effects)
    assert (fail.failure.code, fail.in_band) == ("engine_protocol", True)


@pytest.mark.parametrize("cause", ["ended", "cut"])
def test_end_is_final_once_the_stream_behind_it_closes(cause: CloseCause) -> None:
    """`End` is whole by itself; the stream's close releases it, however it closes."""
    flow = make_flow()
    effects = run(flow, Start(None, "d1"), LegFrames(0, (make_tokens(5), make_end())))
    assert of(FinishAnswer, effects) == []
    effects += run(flow, LegClosed(0, cause))
    assert one(FinishAnswer, effects).path == "aggregated"


def test_end_is_final_after_the_grace() -> None:
    """A stream that stays open behind `End` holds the answer for the grace only."""
    flow = make_flow()
    run(flow, Start(None, "d1"), LegFrames(0, (make_tokens(5), make_end())), now=1.0)
    assert flow.next_wakeup() == 1.25
    assert one(FinishAnswer, run(flow, Tick(), now=1.25)).data == b"data: [DONE]\n\n"


def test_an_answer_that_is_whole_is_not_woken_for_its_deadline() -> None:
    """Its deadline passes while the stream behind `End` is awaited: the one wake-up is at the end of the grace."""
    grace = Limits().end_grace_s
    flow = make_flow(deadline_s=1.0 + grace / 2)
    run(flow, Start(None, "d1"), LegFrames(0, (make_tokens(7), make_end())), now=1.0)
    assert flow.next_wakeup() == pytest.approx(1.0 + grace)
    assert run(flow, Tick(), now=1.0 + grace * 0.9) == []
    assert flow.next_wakeup() == pytest.approx(1.0 + grace)
    assert one(Record, run(flow, Tick(), now=1.0 + grace)).outcome == "ok"


def test_late_frames_of_a_leg_that_was_given_up_are_ignored() -> None:
    """A stalled leg that comes back to life adds nothing to the answer."""
    flow = make_flow(stream=False)
    run(flow, Start(None, "d1"), now=0.0)
    run(flow, Tick(), PodChosen("decode", "d2"), now=5.0)
    assert run(flow, LegFrames(0, (make_tokens(5, data=b""), make_end())), LegClosed(0, "cut"), now=5.1) == []
    assert flow.choices()[0].emitted == ()
    assert flow.state is State.DECODING


@pytest.mark.parametrize("frames", [(), (Alive(step=1),), (make_tokens(8),)], ids=["silent", "accepted", "streaming"])
def test_client_that_leaves_withdraws_the_lease_too(frames: tuple[Frame, ...]) -> None:
    """With a handle in hand and no answer, both legs are aborted: prefill's to withdraw its lease."""
    flow = make_flow()
    effects = run(flow, Start("p1", "d1"), LegFrames(0, (make_prefilled(7, handle=make_handle()),)))
    effects += run(flow, LegFrames(1, frames), ClientGone())
    assert of(AbortLeg, effects) == [AbortLeg(1, "d1"), AbortLeg(0, "p1")]
    assert_balanced(effects)


def test_client_that_leaves_during_prefill_aborts_prefill() -> None:
    """Before the handle there is one leg to abort."""
    effects = run(make_flow(), Start("p1", "d1"), ClientGone())
    assert of(AbortLeg, effects) == [AbortLeg(0, "p1")]
    assert one(Record, effects).outcome == "cancelled"
    assert_balanced(effects)


def test_client_that_does_not_read_is_a_client_that_left() -> None:
    """A stalled client frees both pods; the record says which it was."""
    effects = run(make_flow(), Start(None, "d1"), LegFrames(0, (make_tokens(5),)), ClientGone(stalled=True))
    assert one(Record, effects).outcome == "client_stalled"
    assert of(AbortLeg, effects) == [AbortLeg(0, "d1")]


def test_handle_of_an_answer_that_fails_is_withdrawn() -> None:
    """A decode pool that is full does not leave blocks under a lease until it expires."""
    flow = make_flow()
    effects = run(flow, Start("p1", "d1"), LegFrames(0, (make_prefilled(7, handle=make_handle()),)))
    effects += run(flow, LegFrames(1, (Fail(kind="busy", message="full"),)), PodChosen("decode", None))
    assert AbortLeg(0, "p1") in effects
    assert one(FailAnswer, effects).failure.status == 429


def test_answer_that_decode_recomputed_says_so() -> None:
    """A lost lease shows in the final path and the record."""
    flow = make_flow(stream=False)
    effects = run(flow, Start("p1", "d1"), LegFrames(0, (make_prefilled(7, handle=make_handle()),)))
    effects += run(flow, LegFrames(1, (make_end(recomputed="lease_expired"),)), LegClosed(1, "ended"))
    assert one(FinishAnswer, effects).path == "recomputed"
    assert one(Record, effects).recomputed == "lease_expired"


def test_lease_of_an_answer_that_was_recomputed_is_withdrawn() -> None:
    """Decode refuses some handles before it asks their owner, who hears of it from here; others are not touched."""
    for recomputed, aborted in (("own_handle", [AbortLeg(0, "p1")]), ("", [])):
        flow = make_flow()
        effects = run(flow, Start("p1", "d1"), LegFrames(0, (make_prefilled(7, handle=make_handle()),)))
        effects += run(flow, LegFrames(1, (make_end(recomputed=recomputed),)), LegClosed(1, "ended"))
        assert one(Record, effects).outcome == "ok"
        assert of(AbortLeg, effects) == aborted


def test_request_that_waited_its_deadline_away_opens_no_leg() -> None:
    """The queue's time counts; nothing is booked and no pod is bothered."""
    effects = run(make_flow(deadline_s=5.0), Start("p1", "d1"), now=100.0)
    assert [type(effect) for effect in effects] == [FailAnswer, Record]
    assert one(Record, effects).outcome == "deadline"


def test_choices_are_recorded_apart() -> None:
    """Ids and characters are kept per choice: all that another pod needs."""
    flow = make_flow(n=2)
    run(flow, Start("p1", "d1"), LegFrames(0, (Prefilled(first=(1, 2), cached_tokens=0, handle=None),)))
    run(
        flow,
        LegFrames(1, (Tokens(choice=1, ids=(5, 6), data=b"x", chars=3), Tokens(choice=0, ids=(), data=b"y", chars=1))),
    )
    assert [(choice.emitted, choice.chars_sent) for choice in flow.choices()] == [((1,), 1), ((2, 5, 6), 3)]


def test_bytes_for_an_answer_that_is_not_streamed_are_a_protocol_error() -> None:
    """Nothing may reach such a client before the whole body."""
    flow = make_flow(stream=False)
    effects = run(flow, Start(None, "d1"), LegFrames(0, (make_tokens(5, data=b"data: x\n\n"),)))
    assert of(Send, effects) == []
    assert of(PodFailed, effects) == [PodFailed("d1", "decode", "protocol")]


def test_frames_after_an_end_that_failed_do_not_count() -> None:
    """A batch with a bad frame stops at it: nothing behind it is sent."""
    flow = make_flow()
    effects = run(flow, Start(None, "d1"))
    effects += run(flow, LegFrames(0, (make_tokens(5), make_tokens(6, choice=9), make_tokens(7), make_end())))
    assert len(of(Send, effects)) == 1
    assert one(FailAnswer, effects).in_band


def test_end_of_an_empty_answer_is_an_answer() -> None:
    """A leg whose emitted ids already end the request answers `End` alone."""
    flow = make_flow()
    effects = run(flow, Start("p1", "d1"), LegFrames(0, (make_prefilled(2),)))
    effects += run(flow, LegFrames(1, (End(data=b"e", finish=("stop",), completion_tokens=1, cached_tokens=0),)))
    effects += run(flow, LegClosed(1, "ended"))
    assert one(FinishAnswer, effects).data == b"e"


ROLE_ONLY = Tokens(choice=0, ids=(), data=b"data: role\n\n")


def test_role_chunk_waits_for_the_first_text_so_that_another_pod_can_begin_anew() -> None:
    """A pod that opens the chat and then refuses has given the client nothing that binds it."""
    flow = make_flow()
    effects = run(flow, Start(None, "d1"), LegFrames(0, (ROLE_ONLY,)))
    assert of(Send, effects) == []
    effects += run(flow, LegFrames(0, (Fail(kind="busy", message="full"),)), PodChosen("decode", "d2"))
    effects += run(flow, LegFrames(1, (ROLE_ONLY, make_tokens(5, data=b"data: a\n\n"))))
    assert [effect.data for effect in of(Send, effects)] == [b"data: role\n\ndata: a\n\n"]


def test_role_chunk_goes_out_after_a_second_or_with_the_end() -> None:
    """A client is not left without a byte while a long prompt is computed; nothing of the opening is lost."""
    flow = make_flow()
    effects = run(flow, Start(None, "d1"), LegFrames(0, (ROLE_ONLY, Alive(step=1))))
    assert [effect.data for effect in of(Send, effects)] == [b"data: role\n\n"]
    flow = make_flow()
    effects = run(flow, Start(None, "d1"), LegFrames(0, (ROLE_ONLY, Tokens(choice=0, ids=(2,), data=b""))))
    effects += run(flow, LegFrames(0, (make_end(data=b"data: [DONE]\n\n"),)), LegClosed(0, "ended"))
    assert one(FinishAnswer, effects).data == b"data: [DONE]\n\n"
    assert of(Send, effects)[0].data == b"data: role\n\n"


def test_ids_of_a_pod_that_broke_the_protocol_are_forgotten() -> None:
    """The next leg begins where the bad one did: with prefill's token, and nothing of what came after."""
    flow = make_flow(stream=False)
    run(flow, Start("p1", "d1"), LegFrames(0, (make_prefilled(7, handle=make_handle()),)))
    effects = run(flow, LegFrames(1, (make_tokens(8, data=b""), make_end(completion_tokens=9))))
    effects += run(flow, PodChosen("decode", "d2"))
    assert one(OpenLeg, effects).leg.choices[0].emitted == (7,)
