"""Bugs that other systems of this kind had in public, each planted where this one decides the same thing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from kvferry_router.bookings import Bookings
from kvferry_router.flow import RequestFlow
from kvferry_router.flow_messages import ClientGone
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.kv_manager import KVManager
from kvferry_runtime.core.messages import AbortLeg
from kvferry_runtime.core.scheduler import Scheduler
from kvferry_runtime.transfer import flow_messages as pull_messages
from kvferry_runtime.transfer.flow import FlowState, TransferFlow
from kvferry_runtime.transfer.lease import LeaseTable
from tests.simulation.bugs.registry import bug, wrapped

# ---- leases and pulls ----------------------------------------------------------------------------------------------


@bug("queued", "live_lease", report="vllm-project/vllm#53095")
def queued_requests_do_not_renew() -> Iterator[None]:
    """Whoever waits for blocks at decode sends no heartbeat, and loses the lease that it waits to read."""

    def make(real: Any) -> Any:
        def tick(self: TransferFlow, now: float) -> Any:
            effects = real(self, now)
            if self.state is not FlowState.HOLDING:
                return effects
            self._live_until = float("inf")
            return [effect for effect in effects if not isinstance(effect, pull_messages.SendRenew)]

        return tick

    with wrapped(TransferFlow, "_tick", make):
        yield


@bug("queued", "live_lease", report="vllm-project/vllm#47021")
def expiry_is_judged_by_another_hosts_clock() -> Iterator[None]:
    """The owner compares with a clock that is a minute ahead."""

    def make_tick(real: Any) -> Any:
        return lambda self, now: real(self, now + 60.0)

    def make_next(real: Any) -> Any:
        def next_expiry(self: LeaseTable) -> float | None:
            due = real(self)
            return None if due is None else due - 60.0

        return next_expiry

    with wrapped(LeaseTable, "tick", make_tick), wrapped(LeaseTable, "next_expiry", make_next):
        yield


@bug("crashing", "KeyError", report="llm-d/llm-d#187")
def word_of_an_unknown_lease_raises() -> Iterator[None]:
    """A notification for a request that is not known any more ends the process."""

    def make(real: Any) -> Any:
        def answer(self: LeaseTable, ref: Any) -> Any:
            if ref.lease_id not in self._ended:
                raise KeyError(ref.lease_id)
            return real(self, ref)

        return answer

    with wrapped(LeaseTable, "_answer_of_ended", make):
        yield


@bug("unheard", "failed", report="vllm-project/vllm#35943")
def decode_waits_for_ever_for_its_kv() -> Iterator[None]:
    """A peer that says nothing is never given up."""

    def make(real: Any) -> Any:
        def tick(self: TransferFlow, now: float) -> Any:
            self._step_deadline = self._live_until = self._deadline = float("inf")
            return real(self, now)

        return tick

    with wrapped(TransferFlow, "_tick", make):
        yield


# ---- blocks --------------------------------------------------------------------------------------------------------


@bug("squeezed", "IntegrityError", "integrity", "two_writers", report="LMCache/LMCache#1969")
def block_list_is_extended_after_preemption() -> Iterator[None]:
    """What a sequence had before it was preempted is still in its list when it runs again."""

    lists: dict[tuple[int, int], list[int]] = {}

    def make_preempt(real: Any) -> Any:
        def preempt(self: Scheduler, sequence: Any) -> None:
            lists[id(self._kv), sequence.number] = list(sequence.table)
            real(self, sequence)

        return preempt

    def make_admit(real: Any) -> Any:
        def admit(self: KVManager, sequence: Any, hits: Any) -> None:
            real(self, sequence, hits)
            sequence.table = [*lists.get((id(self), sequence.number), ()), *sequence.table]

        return admit

    with wrapped(Scheduler, "_preempt", make_preempt), wrapped(KVManager, "admit", make_admit):
        yield


@bug("tight", "IntegrityError", "wrong_token", "tenants", "two_writers", report="vllm-project/vllm#17305")
def cached_blocks_are_those_of_the_arrival() -> Iterator[None]:
    """What was found in the cache when a request came is used when it runs, whatever was evicted in between."""
    found: dict[tuple[int, int], list[int]] = {}

    def make(real: Any) -> Any:
        def lookup(self: KVManager, sequence: Any) -> list[int]:
            return found.setdefault((id(self), sequence.number), real(self, sequence))

        return lookup

    with wrapped(KVManager, "lookup", make):
        yield


@bug("squeezed", "IntegrityError", report="vllm-project/vllm#18631")
def room_is_not_asked_for_when_kv_has_arrived() -> Iterator[None]:
    """Ferried KV is there, no block is free in that step, and the step goes on as if one were."""

    def make(real: Any) -> Any:
        def can_grow(self: KVManager, sequence: Any) -> bool:
            return True if sequence.leg.submit.handle is not None else bool(real(self, sequence))

        return can_grow

    with wrapped(KVManager, "can_grow", make):
        yield


# ---- requests ------------------------------------------------------------------------------------------------------


@bug("leaving", "KeyError", report="vllm-project/vllm#25067")
def abort_of_a_leg_that_has_ended_raises() -> Iterator[None]:
    """An abort and the end of its request cross each other, and the engine dies of it."""

    def make(real: Any) -> Any:
        def abort(self: EngineCore, event: AbortLeg, now: float) -> Any:
            if event.key not in self._legs:
                raise KeyError(event.key)
            return real(self, event, now)

        return abort

    # The handlers of an engine are bound when it is made.
    with wrapped(EngineCore, "_abort", make):
        yield


@bug("staged", "not_forgotten", report="vllm-project/production-stack#867")
def cancel_of_a_whole_answer_is_not_carried() -> Iterator[None]:
    """A client that leaves before it has a byte is not told of to the pods."""

    def make(real: Any) -> Any:
        def gone(self: RequestFlow, event: ClientGone, now: float, out: list[Any]) -> None:
            before = len(out)
            sent = self._answer.sent
            real(self, event, now, out)
            if not sent:
                out[before:] = [effect for effect in out[before:] if type(effect).__name__ != "AbortLeg"]

        return gone

    with wrapped(RequestFlow, "_gone", make):
        yield


@bug("calm", "false_end", "finish_reason", "wrong_token", report="vllm-project/production-stack#797")
def decode_is_given_what_prefill_was_asked_for() -> Iterator[None]:
    """The one token that prefill was to compute is all that decode may add."""

    def make(real: Any) -> Any:
        def open_leg(self: RequestFlow, kind: str, pod: str, until: float, now: float, out: list[Any]) -> None:
            real(self, kind, pod, until, now, out)
            leg = out[-1].leg
            if kind == "decode" and leg.handle is not None:
                sampling = msgspec.structs.replace(leg.sampling, max_tokens=1)
                out[-1] = replace(out[-1], leg=msgspec.structs.replace(leg, sampling=sampling))

        return open_leg

    with wrapped(RequestFlow, "_open_leg", make):
        yield


@bug("calm", "BookingError", report="vllm-project/router#197")
def load_counter_is_reset_under_open_streams() -> Iterator[None]:
    """A look at a pod begins its count anew; what ends later takes it below zero."""

    def make(real: Any) -> Any:
        def book(self: Bookings, key: tuple[str, str], pod: str, **sizes: int) -> None:
            if pod in self._pods and len(self._held) > 2:
                self._pods[pod].legs = 0
            real(self, key, pod, **sizes)

        return book

    with wrapped(Bookings, "book", make):
        yield
