"""Bugs of pods that drain: a leg goes on after it left, leaves twice or not at all, or its KV is not what it says."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec

from kvferry_router.select import policy
from kvferry_runtime.core import engine as engine_module
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.handoff import Parcel
from kvferry_runtime.core.handoff import parcel_of as real_parcel_of
from kvferry_runtime.core.kv_manager import KVManager
from kvferry_runtime.core.messages import HandedOver, TokensOut
from kvferry_runtime.server import leg_check
from tests.simulation.bugs.registry import bug, wrapped


def _after_leaving(effect: Any) -> Any:
    """One more output, made of a leg's last word."""

    def make(real: Any) -> Any:
        def try_hand_over(self: EngineCore, leg: Any) -> Any:
            effects = real(self, leg)
            return effects + [effect(each) for each in effects if isinstance(each, HandedOver)]

        return try_hand_over

    return wrapped(EngineCore, "_try_hand_over", make)


@bug("rolling", "after_handoff")
def token_comes_after_the_handoff() -> Iterator[None]:
    """The step under way still picks for a leg that has left: two pods give the same position."""
    with _after_leaving(lambda told: TokensOut(key=told.key, choice=0, ids=(1,))):
        yield


@bug("rolling", "after_handoff")
def leg_leaves_twice() -> Iterator[None]:
    """A repeated request hands over again, for two pods to go on."""
    with _after_leaving(lambda told: msgspec.structs.replace(told)):
        yield


@bug("rolling", "integrity", "lease_blocks", "wrong_token")
def blocks_go_back_while_they_are_handed_over() -> Iterator[None]:
    """The lease is told of and the pool is not: another leg's KV takes the place while it is read."""

    def hand_over(self: KVManager, blocks: tuple[int, ...], lease_id: int) -> None:
        self._handed.add(lease_id)

    with patch.object(KVManager, "hand_over", hand_over):
        yield


@bug("rolling", "false_handle", "wrong_token")
def last_token_without_kv_is_handed_over() -> Iterator[None]:
    """The handle counts the token that was picked last, whose K and V nobody has computed."""

    def parcel_of(leg: Any, block_size: int) -> Parcel | None:
        parcel = real_parcel_of(leg, block_size)
        if parcel is None or len(leg.choices) > 1:
            return parcel
        tokens = leg.sequences[0].tokens[: len(parcel.ids) + 1]
        return Parcel(tuple(leg.sequences[0].table[: -(-len(tokens) // block_size)]), tuple(tokens))

    with patch.object(engine_module, "parcel_of", parcel_of):
        yield


@bug("two_contexts", "false_end", "finish_reason")
def room_for_the_answer_is_not_asked_for() -> Iterator[None]:
    """A pod with a shorter context goes on with an answer, and ends it where its own context does."""

    def make(real: Any) -> Any:
        return lambda kind, pod, ask: real(kind, pod, replace(ask, answer_tokens=1))

    with wrapped(policy, "why_not", make), patch.object(leg_check, "context_fault", lambda leg, most: None):
        yield


@bug("rolling", "late_departure")
def drain_never_ends() -> Iterator[None]:
    """A leg that leaves is forgotten without a word: its reader waits, and so does the pod."""

    def make(real: Any) -> Any:
        def try_hand_over(self: EngineCore, leg: Any) -> Any:
            real(self, leg)
            return []

        return try_hand_over

    with wrapped(EngineCore, "_try_hand_over", make):
        yield
