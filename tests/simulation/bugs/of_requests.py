"""Bugs that give a token twice, lose one, end an answer falsely, or leave something of a request behind."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec

from kvferry_router import flow_messages as router_messages
from kvferry_router.attempts import Attempts
from kvferry_router.flow import RequestFlow
from kvferry_router.flow_states import State as FlowState
from kvferry_router.index.feed import StateFeed
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.messages import PullFinished
from kvferry_runtime.core.scheduler import Scheduler
from kvferry_runtime.transfer.lease import LeaseTable
from kvferry_wire.frames import End
from kvferry_wire.state import StateMessage
from tests.simulation.answers import Ending
from tests.simulation.bugs.registry import bug, wrapped
from tests.simulation.owner_shell import OwnerShell


@bug("late", "wrong_token")
def first_token_is_picked_again_after_a_fallback() -> Iterator[None]:
    """A pull that failed makes decode start from the prompt alone, and give the first token a second time."""

    def make(real: Any) -> Any:
        def pull_finished(self: EngineCore, event: PullFinished, now: float) -> Any:
            effects = real(self, event, now)
            leg = self._legs.get(event.key)
            if event.reason and leg is not None:
                for choice in leg.choices:
                    choice.emitted.clear()
                for sequence in leg.sequences:
                    del sequence.tokens[leg.prompt_len :]
            return effects

        return pull_finished

    with patch.object(EngineCore, "_pull_finished", make(EngineCore._pull_finished)):
        yield


@bug("tight", "wrong_token")
def preemption_forgets_what_was_emitted() -> Iterator[None]:
    """A preempted sequence picks its tokens again, at their places' noise but as if they were new."""

    def make(real: Any) -> Any:
        def preempt(self: Scheduler, sequence: Any) -> None:
            real(self, sequence)
            if sequence.choice is not None:
                sequence.leg.choices[sequence.choice].emitted.clear()
                del sequence.tokens[sequence.leg.prompt_len :]

        return preempt

    with wrapped(Scheduler, "_preempt", make):
        yield


@bug("crashing", "wrong_token")
def retried_leg_starts_from_the_prompt() -> Iterator[None]:
    """Another decode pod is not told of the tokens that were recorded already."""

    def make(real: Any) -> Any:
        def open_leg(self: RequestFlow, kind: str, pod: str, until: float, now: float, out: list[Any]) -> None:
            again = self._attempts.opened > 1
            real(self, kind, pod, until, now, out)
            if kind == "decode" and again:
                leg = out[-1].leg
                choices = tuple([msgspec.structs.replace(choice, emitted=()) for choice in leg.choices])
                out[-1] = replace(out[-1], leg=msgspec.structs.replace(leg, choices=choices))

        return open_leg

    with wrapped(RequestFlow, "_open_leg", make):
        yield


@bug("late", "given_up", "wrong_token", "false_end", "order", report="vllm-project/vllm#51637")
def frames_of_an_abandoned_leg_count() -> Iterator[None]:
    """What a leg says after the router gave it up is passed on beside its successor's answer."""
    with patch.object(Attempts, "is_open", lambda self, number: self.open is not None):
        yield


# ---- ends --------------------------------------------------------------------------------------------------------


@bug("crashing", "false_end", report="BerriAI/litellm#39748")
def cut_stream_is_a_clean_end() -> Iterator[None]:
    """A decode stream that breaks off ends the answer as if it were whole."""

    def make(real: Any) -> Any:
        def closed(self: RequestFlow, event: router_messages.LegClosed, now: float, out: list[Any]) -> None:
            if self._attempts.is_open(event.attempt) and self.state is FlowState.STREAMING:
                given = self._answer.given
                finish = ("stop",) * len(given)
                ending = Ending(finish, self._answer._prompt_tokens, given.tokens, 0, "")
                end = End(data=ending.encode(), finish=finish, completion_tokens=given.tokens, cached_tokens=0)
                self._end_frame(end, now, out)
            real(self, event, now, out)

        return closed

    with wrapped(RequestFlow, "_closed", make):
        yield


@bug("leaving", "not_forgotten", report="vllm-project/vllm#50425")
def abort_does_not_reach_prefill() -> Iterator[None]:
    """A client that leaves after prefill leaves its lease behind, until that expires."""

    def make(real: Any) -> Any:
        def stop(self: RequestFlow, out: list[Any]) -> None:
            self._holds.read()
            if self._attempts.open is not None and self._attempts.open.kind == "prefill":
                self._attempts.open = None
            real(self, out)

        return stop

    with wrapped(RequestFlow, "_stop", make):
        yield


@bug("lossy", "leak", "BookingError", report="ai-dynamo/dynamo#11647")
def bookings_outlive_failed_legs() -> Iterator[None]:
    """A leg that failed is counted on its pod for ever."""

    def make(real: Any) -> Any:
        def leg_failed(self: RequestFlow, *args: Any, **more: Any) -> None:
            if self._attempts.the_open.kind == "decode":
                self._holds._booked.pop("decode", None)
            real(self, *args, **more)

        return leg_failed

    with wrapped(RequestFlow, "_leg_failed", make):
        yield


@bug("reborn", "older_incarnation", report="vllm-project/vllm#49238")
def older_incarnation_is_believed() -> Iterator[None]:
    """A lease is found by its number alone, though the engine that granted it is gone."""

    def make(real: Any) -> Any:
        def agrees(self: LeaseTable, ref: Any, lease: Any) -> bool:
            return bool(ref.epoch == lease.epoch)

        return agrees

    with wrapped(LeaseTable, "_agrees", make):
        yield


@bug("facing", "failed")
def engines_wait_for_each_others_leases() -> Iterator[None]:
    """Two engines that have leased all they have to each other wait for room until the deadline."""
    with patch.object(Scheduler, "_give_way", lambda self, step, now: None):
        yield


@bug("calm", "busy_wait")
def whole_answer_is_woken_again_and_again() -> Iterator[None]:
    """`End` is there, its stream is not over, and a time that has passed is still looked at."""

    def make(real: Any) -> Any:
        def next_wakeup(self: RequestFlow) -> float | None:
            due = real(self)
            return self._attempts.the_open.heard_at if self.state is FlowState.ENDING else due

        return next_wakeup

    with wrapped(RequestFlow, "next_wakeup", make):
        yield


def _taken_in_stride(what: str) -> Callable[[Any], Any]:
    """A break of the state stream that is not noticed: the message is applied as if it were the next one."""

    def make(real: Any) -> Any:
        def rejoin(self: StateFeed, reason: str, message: StateMessage) -> Any:
            if reason != what:
                return real(self, reason, message)
            self.incarnation = message.incarnation
            return self._apply(message)

        return rejoin

    return make


@bug("lossy", "index", report="llm-d/llm-d-router#1737")
def gap_in_the_state_stream_is_not_noticed() -> Iterator[None]:
    """A lost message leaves blocks in the router's index that the pod no longer has, for ever."""
    with wrapped(StateFeed, "_rejoin", _taken_in_stride("gap")):
        yield


@bug("reborn", "index", report="llm-d/llm-d-router#2853")
def index_of_a_dead_incarnation_stays() -> Iterator[None]:
    """What a pod had before it was started again is still counted on."""
    with wrapped(StateFeed, "_rejoin", _taken_in_stride("incarnation")):
        yield


@bug("ending_router", "not_freed")
def leases_outlive_the_router_that_was_told_of_them() -> Iterator[None]:
    """Prefill's KV waits for its time though nobody is left to send a reader: the end of a connection ends no lease."""

    def make(real: Any) -> Any:
        def answered(self: OwnerShell, lease_id: int, *, delivered: bool) -> None:
            if delivered:
                real(self, lease_id, delivered=True)

        return answered

    with wrapped(OwnerShell, "answered", make):
        yield
