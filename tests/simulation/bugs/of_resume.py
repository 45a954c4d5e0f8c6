"""Bugs of resumed answers: something is given twice, not at all, by the wrong model, tenant or seed, or for ever.

Where a public report of another system tells of such a bug, it is named.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec

from kvferry_router import flow as flow_module
from kvferry_router.answer import Answer
from kvferry_router.attempts import Attempts
from kvferry_router.flow import RequestFlow
from kvferry_router.flow_messages import FailAnswer, FinishAnswer, FinishLeg, LegClosed
from kvferry_router.flow_states import State as FlowState
from kvferry_router.given import Given
from kvferry_router.losses import Losses
from kvferry_router.resumes import Suspects
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import End, Tokens
from kvferry_wire.leg import Leg
from tests.simulation.answers import DONE, Ending
from tests.simulation.bugs.registry import bug, wrapped
from tests.simulation.server_shell import ServerShell

Change = Callable[[Leg], Leg]


def _resumed_legs(change: Change) -> Any:
    """Each leg that goes on with an answer is changed like this before it is sent."""

    def make(real: Any) -> Any:
        def open_leg(self: RequestFlow, kind: str, pod: str, until: float, now: float, out: list[Any]) -> None:
            real(self, kind, pod, until, now, out)
            if self._losses.causes:
                out[-1] = replace(out[-1], leg=change(out[-1].leg))

        return open_leg

    return wrapped(RequestFlow, "_open_leg", make)


def _choices(change: Callable[[Any], Any]) -> Change:
    return lambda leg: msgspec.structs.replace(leg, choices=tuple([change(choice) for choice in leg.choices]))


# ---- tokens ------------------------------------------------------------------------------------------------------


@bug("dying", "wrong_token", "order")
def last_token_before_the_cut_is_picked_again() -> Iterator[None]:
    """The token that came with the broken read is not told to the next pod (ai-dynamo/dynamo: migration)."""
    with _resumed_legs(_choices(lambda choice: msgspec.structs.replace(choice, emitted=choice.emitted[:-1]))):
        yield


@bug("dying", "wrong_token", "order", "false_end", report="llm-d/llm-d-router#2345")
def token_is_lost_at_the_cut() -> Iterator[None]:
    """A frame that was recorded and not passed on: the client misses a character."""

    def make(real: Any) -> Any:
        def tokens(self: Answer, frame: Tokens, now: float, out: list[Any]) -> bool:
            before = len(out)
            sent: bool = real(self, frame, now, out)
            if self.interrupted is None and self.given.tokens == 7:
                del out[before:]
            return sent

        return tokens

    with wrapped(Answer, "tokens", make):
        yield


@bug("dying", "order")
def characters_are_sent_twice_after_a_cut() -> Iterator[None]:
    """The next pod writes the text of all tokens so far once more (BerriAI/litellm: fallbacks in mid-stream)."""
    with _resumed_legs(_choices(lambda choice: msgspec.structs.replace(choice, chars_sent=0))):
        yield


@bug("dying", "wrong_token", "order", "false_end", "given_up")
def only_the_first_choice_is_resumed() -> Iterator[None]:
    """The other choices of the answer begin anew."""

    def change(leg: Leg) -> Leg:
        others = tuple([msgspec.structs.replace(choice, emitted=()) for choice in leg.choices[1:]])
        return msgspec.structs.replace(leg, choices=leg.choices[:1] + others)

    with _resumed_legs(change):
        yield


@bug("dying", "wrong_token")
def seed_is_drawn_anew_for_a_resumed_leg() -> Iterator[None]:
    """Sampling goes on with other noise: the rest is that of another answer."""

    def change(leg: Leg) -> Leg:
        return msgspec.structs.replace(leg, sampling=msgspec.structs.replace(leg.sampling, seed=leg.sampling.seed ^ 1))

    with _resumed_legs(change):
        yield


@bug("dying", "wrong_token")
def first_token_of_a_second_prefill_is_added() -> Iterator[None]:
    """Prefill that computes the prompt for a resumed answer picks a token that the client has already."""

    def first(self: Given, ids: Any) -> bool:
        return all(self.take(choice, (token,), 0) for choice, token in enumerate(ids))

    with patch.object(Given, "first", first):
        yield


@bug("dying", "wrong_token", "order", "false_end", "bytes_after_end", report="vllm-project/vllm#51637")
def late_frames_of_the_old_leg_are_taken() -> Iterator[None]:
    """A pod that wakes up goes on writing into an answer that another one writes."""
    with (
        patch.object(Attempts, "is_open", lambda self, number: self.open is not None),
        wrapped(flow_module.RequestFlow, "_tick", lambda real: real),
    ):
        yield


# ---- ends --------------------------------------------------------------------------------------------------------


@bug("dying", "two_ends", "bytes_after_end", "AssertionError", "two_outcomes", "IllegalEventError")
def answer_is_resumed_after_its_end() -> Iterator[None]:
    """`End` is passed on at once, and the cut behind it is taken for the loss of the leg."""

    def make(real: Any) -> Any:
        def end_frame(self: RequestFlow, frame: End, now: float, out: list[Any]) -> None:
            real(self, frame, now, out)
            if self.state is FlowState.ENDING:
                self._answer.finish(out)
                self.state = FlowState.STREAMING

        return end_frame

    with wrapped(RequestFlow, "_end_frame", make):
        yield


@bug("dying_alone", "false_end", "usage", "finish_reason", report="NVIDIA/TensorRT-LLM#18289")
def failed_stream_ends_in_done() -> Iterator[None]:
    """No pod is left: the stream ends as if it were whole."""

    def fail(self: Answer, failure: Any, out: list[Any]) -> None:
        if not self.sent:
            out.append(FailAnswer(failure, in_band=False))
            return
        ending = Ending(("stop",) * len(self.given), self._prompt_tokens, self.given.tokens, self.cached_tokens, "")
        out.append(FinishAnswer(ending.encode(), self.path, self._stream))

    assert DONE
    with patch.object(Answer, "fail", fail):
        yield


@bug("ending_router", "false_end", "usage", "finish_reason", "untold")
def stopping_router_ends_its_streams_in_done() -> Iterator[None]:
    """What is cut by the router's own end looks whole to its client."""

    def stopped(self: RequestFlow, event: Any, now: float, out: list[Any]) -> None:
        given = self._answer.given
        ending = Ending(("stop",) * len(given), self._answer._prompt_tokens, given.tokens, 0, "")
        self._stop(out)
        out.append(FinishAnswer(ending.encode(), self._answer.path, stream=True))
        self._record("stopping", now, out)

    with patch.object(RequestFlow, "_stopped", stopped):
        yield


@bug("dying", "usage", "wrong_token")
def emitted_tokens_are_counted_twice() -> Iterator[None]:
    """The last pod counts what it was given on top of what it made, and nobody compares."""

    def make_end(real: Any) -> Any:
        def end(self: ServerShell, served: Any) -> None:
            for writer, choice in zip(served.writers, served.leg.choices, strict=True):
                if len(choice.emitted) > 1:
                    writer.ids += choice.emitted
            real(self, served)

        return end

    def make_ends(real: Any) -> Any:
        def ends(self: Answer, frame: End, now: float, out: list[Any]) -> bool:
            same = msgspec.structs.replace(frame, completion_tokens=self.given.tokens)
            taken: bool = real(self, same, now, out)
            self.end = frame
            return taken

        return ends

    with wrapped(ServerShell, "_end", make_end), wrapped(Answer, "ends", make_ends):
        yield


@bug("dying", "given_up")
def pods_count_emitted_tokens_twice() -> Iterator[None]:
    """The same, and the router does compare: it believes no such end, and the answer fails where it need not."""

    def make(real: Any) -> Any:
        def end(self: ServerShell, served: Any) -> None:
            for writer, choice in zip(served.writers, served.leg.choices, strict=True):
                if len(choice.emitted) > 1:
                    writer.ids += choice.emitted
            real(self, served)

        return end

    with wrapped(ServerShell, "_end", make):
        yield


@bug("dying", "usage")
def cached_tokens_are_those_of_the_last_pod() -> Iterator[None]:
    """The client is told of a cache that had nothing to do with its answer's beginning."""

    def make(real: Any) -> Any:
        def on_tokens(self: ServerShell, served: Any, output: Any) -> None:
            if self._pod and served.leg.resumed:
                served.cached = len(served.leg.prompt_ids)
            real(self, served, output)

        return on_tokens

    with wrapped(ServerShell, "_on_tokens", make):
        yield


@bug("dying", "untold")
def client_is_not_told_of_a_resume() -> Iterator[None]:
    """The end of the stream says nothing of what happened on the way."""
    with _resumed_legs(lambda leg: msgspec.structs.replace(leg, resumed="")):
        yield


# ---- whose answer, and on which pod ------------------------------------------------------------------------------


@bug("dying", "tenants", report="vllm-project/vllm#17045")
def salt_of_another_tenant_is_sent_along() -> Iterator[None]:
    """A resumed leg shares KV with prompts of others."""

    def change(leg: Leg) -> Leg:
        return msgspec.structs.replace(leg, extras=KeyExtras(tenant_salt=leg.extras.tenant_salt + b"x"))

    with _resumed_legs(change):
        yield


@bug("mixed", "wrong_token", report="llm-d/llm-d#499")
def answer_goes_on_at_another_model() -> Iterator[None]:
    """Pods of two revisions live side by side, and any of them will do."""

    def make(real: Any) -> Any:
        def start(self: RequestFlow, event: Any, now: float, out: list[Any]) -> None:
            real(self, replace(event, compat_hash=""), now, out)

        return start

    with wrapped(RequestFlow, "_start", make):
        yield


@bug("dying", "not_freed", report="sgl-project/sglang#29017")
def lost_leg_is_not_aborted() -> Iterator[None]:
    """A pod that was only paused, or cut off, goes on computing for nobody."""

    def abort(self: Attempts, out: list[Any]) -> None:
        if self.open is not None:
            out.append(FinishLeg(self.open.number))
            self.open = None

    with patch.object(Attempts, "abort", abort):
        yield


# ---- how often, and for how long ---------------------------------------------------------------------------------


@bug("poison", "fleet")
def request_that_ends_pods_is_tried_on_all_of_them() -> Iterator[None]:
    """One request takes down the fleet, pod by pod."""

    def make(real: Any) -> Any:
        def why_give_up(self: Losses, *, patient: bool) -> Any:
            reason = real(self, patient=patient)
            return None if reason == "barren" else reason

        return why_give_up

    with wrapped(Losses, "why_give_up", make):
        yield


@bug("poison", "fleet")
def request_that_ended_pods_may_come_again() -> Iterator[None]:
    """Clients repeat what failed: each time takes down as many pods."""
    with patch.object(Suspects, "holds", lambda self, leg, now: False):
        yield


@bug("dying_alone", "given_up")
def next_life_of_a_lone_pod_is_not_waited_for() -> Iterator[None]:
    """Answers fail although their pod is back in a moment."""
    with patch.object(RequestFlow, "_patient", lambda self: False):
        yield


@bug("dying", "given_up")
def pod_that_failed_once_is_left_out_for_ever() -> Iterator[None]:
    """Each pod has had its turn, and none may have another, however healthy it is."""

    def make(real: Any) -> Any:
        def add(self: Losses, kind: Any, pod: str, how: Any, **more: Any) -> None:
            real(self, kind, pod, how, **more)
            self._broken[kind].add(pod)

        return add

    with wrapped(Losses, "add", make):
        yield


@bug("dying", "leak")
def room_for_ids_is_not_given_back() -> Iterator[None]:
    """What the router keeps of answers grows until none can be resumed."""
    with patch.object(Given, "release", lambda self: None):
        yield


@bug("cut", "given_up")
def lost_leg_is_the_end_of_its_answer() -> Iterator[None]:
    """The state of the art: a stream breaks with its pod (vllm-project/production-stack, sgl-project router)."""

    def make(real: Any) -> Any:
        def closed(self: RequestFlow, event: LegClosed, now: float, out: list[Any]) -> None:
            lost = self._attempts.is_open(event.attempt) and event.cause == "cut" and self._answer.sent
            if lost and self.state is not FlowState.ENDING:
                self._attempts.finish(out)
                self._give_up("no_pod", self._losses.error, now, out)
            else:
                real(self, event, now, out)

        return closed

    with wrapped(RequestFlow, "_closed", make):
        yield
