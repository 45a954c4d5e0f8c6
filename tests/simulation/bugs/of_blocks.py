"""Bugs that free blocks too early, too late, or twice."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kvferry_runtime.core.block_pool import BlockPool
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.kv_manager import KVManager
from kvferry_runtime.core.messages import LeaseEnded
from kvferry_runtime.transfer import flow_messages as pull_messages
from kvferry_runtime.transfer.flow import FlowState, TransferFlow
from kvferry_runtime.transfer.lease import LeaseState, LeaseTable
from kvferry_runtime.transfer.reasons import RecomputeReason
from tests.simulation.bugs.registry import bug, wrapped


@bug("tight_leaving", "foreign_write")
def pull_finishes_while_bytes_still_arrive() -> Iterator[None]:
    """A dropped pull gives its blocks back at once, and the back end goes on writing."""

    def make(real: Any) -> Any:
        def handle(self: TransferFlow, event: Any, now: float) -> Any:
            if self.ended:
                return []
            effects = real(self, event, now)
            if self.state in (FlowState.CANCELLING, FlowState.FAILING):
                self.state = FlowState.CANCELLED
                return [*effects, pull_messages.Finished(RecomputeReason.CANCELLED, 0.0, 0)]
            return effects

        return handle

    with wrapped(TransferFlow, "handle", make):
        yield


@bug("tight_leaving", "foreign_write")
def aborted_pull_frees_its_blocks_at_once() -> Iterator[None]:
    """The engine does not wait for the transfer to let go of an aborted leg's blocks."""

    def make(real: Any) -> Any:
        def remove(self: EngineCore, leg: Any, reason: str) -> Any:
            self._kv.end_pull(leg.key)
            return real(self, leg, reason)

        return remove

    with wrapped(EngineCore, "_remove", make):
        yield


@bug("parted", "leak", report="vllm-project/vllm#38027")
def lease_never_expires() -> Iterator[None]:
    """A reader that is gone keeps blocks for ever."""
    with patch.object(LeaseTable, "tick", lambda self, now: self.take_ended()):
        yield


@bug("calm", "lease_blocks")
def leased_blocks_are_freed_with_their_leg() -> Iterator[None]:
    """Prefill gives its blocks back when its leg ends, though a lease is on them."""

    def make(real: Any) -> Any:
        def to_lease(self: KVManager, sequence: Any, lease_id: int) -> Any:
            blocks = real(self, sequence, lease_id)
            self.end_lease(lease_id)
            return blocks

        return to_lease

    with wrapped(KVManager, "to_lease", make):
        yield


@bug("stale", "wrong_token")
def renewal_revives_an_expired_lease() -> Iterator[None]:
    """A late heartbeat brings a lease back whose blocks have a new owner."""

    def make(real: Any) -> Any:
        def renew(self: LeaseTable, ref: Any, now: float) -> str:
            answer = real(self, ref, now)
            ended = self._ended.get(ref.lease_id)
            return "held" if answer == "expired" and ended is not None else answer

        return renew

    def make_lookup(real: Any) -> Any:
        kept: dict[tuple[int, int], Any] = {}

        def lookup(self: LeaseTable, ref: Any) -> Any:
            found = real(self, ref)
            if found.answer == "held":
                kept[id(self), ref.lease_id] = found
            return kept.get((id(self), ref.lease_id), found) if found.answer == "expired" else found

        return lookup

    def make_release(real: Any) -> Any:
        def release(self: LeaseTable, ref: Any, *rest: Any) -> str:
            answer = real(self, ref, *rest)
            ended = self._ended.get(ref.lease_id)
            return "held" if ended is not None and ended.state is LeaseState.EXPIRED else answer

        return release

    with (
        wrapped(LeaseTable, "renew", make),
        wrapped(LeaseTable, "lookup", make_lookup),
        wrapped(LeaseTable, "release", make_release),
    ):
        yield


@bug("late", "leak", report="LMCache/LMCache#1034")
def end_of_a_lease_is_not_told() -> Iterator[None]:
    """The table ends a released lease, the engine keeps its blocks."""

    def make(real: Any) -> Any:
        def handle(self: EngineCore, event: Any, now: float) -> Any:
            return [] if isinstance(event, LeaseEnded) and event.why == "failed" else real(self, event, now)

        return handle

    with wrapped(EngineCore, "handle", make):
        yield


@bug("calm", "IntegrityError", "integrity", report="LMCache/LMCache#5098")
def shared_block_is_freed_with_its_first_owner() -> Iterator[None]:
    """A release drops the block, not one reference on it."""

    def make(real: Any) -> Any:
        def release(self: BlockPool, blocks: Any) -> None:
            for block in blocks:
                if self._refs.get(block, 0) > 1 and block not in self._quarantined:
                    self._refs[block] = 1
                real(self, (block,))

        return release

    with wrapped(BlockPool, "release", make):
        yield
