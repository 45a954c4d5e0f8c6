"""Bugs that let a sequence read KV that is stale, foreign, or not there yet."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kvferry_runtime.core.kv_manager import KVManager
from kvferry_runtime.transfer import flow_messages as pull_messages
from kvferry_runtime.transfer.flow import FlowState, TransferFlow
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.data import ReleaseRequest
from tests.simulation import data_reads as simulated_reads
from tests.simulation import pod as simulated_pod
from tests.simulation.bugs.registry import bug, wrapped
from tests.simulation.owner_shell import OwnerShell


@bug("stale", "wrong_token")
def pull_is_valid_without_validation() -> Iterator[None]:
    """The blocks are computed on as soon as the last byte is there, whatever became of the lease meanwhile."""

    def make(real: Any) -> Any:
        def read_done(self: TransferFlow, answer: Any, now: float) -> Any:
            effects = real(self, None, now)
            if self.state is not FlowState.VALIDATING:
                return effects
            self.state = FlowState.DONE
            return [*effects, pull_messages.Finished(None, 0.0, self._nbytes)]

        return read_done

    with wrapped(TransferFlow, "_read_done", make):
        yield


@bug("stale", "wrong_token")
def expired_answer_counts_as_held() -> Iterator[None]:
    """The reader believes any answer to its release."""

    def make(real: Any) -> Any:
        def on_answer(self: TransferFlow, message_id: int, answer: str, now: float) -> Any:
            return real(self, message_id, "held", now)

        return on_answer

    with wrapped(TransferFlow, "_on_answer", make):
        yield


@bug("stale", "wrong_token")
def release_overtakes_the_bytes() -> Iterator[None]:
    """The owner takes a release as soon as it arrives, and gives blocks back that are still being copied."""

    def make(real: Any) -> Any:
        def on_message(self: OwnerShell, stream: Any, message: Any) -> None:
            if isinstance(message, ReleaseRequest):
                self._take(stream, message)
            else:
                real(self, stream, message)

        return on_message

    with wrapped(OwnerShell, "on_message", make):
        yield


@bug("damaged", "wrong_token", report="LMCache/LMCache#4385")
def checksums_are_not_compared() -> Iterator[None]:
    """What arrived is believed, whatever its checksum says."""
    with patch.object(simulated_reads, "first_damaged", lambda *_: None):
        yield


@bug("forged", "wrong_token", report="vllm-project/vllm#52234")
def prompt_digest_is_not_compared() -> Iterator[None]:
    """A genuine handle of another prompt is believed."""

    def make(real: Any) -> Any:
        def handle_fault(*args: Any, **fields: Any) -> Any:
            fault = real(*args, **fields)
            return None if fault is not None and fault.reason is RecomputeReason.DIGEST else fault

        return handle_fault

    with wrapped(simulated_pod, "handle_fault", make):
        yield


@bug("forged", "forged_handle", report="vllm-project/vllm#52232")
def handle_mac_is_not_checked() -> Iterator[None]:
    """A handle that was changed on its way is believed, and so is what it says of its own digest."""

    def make(real: Any) -> Any:
        def handle_fault(submit: Any, handle: Any, **fields: Any) -> Any:
            fault = real(submit, handle, **fields)
            forged = fault is not None and fault.reason in (RecomputeReason.MAC, RecomputeReason.HANDLE)
            return None if forged else fault

        return handle_fault

    with (
        wrapped(simulated_pod, "handle_fault", make),
        patch("kvferry_runtime.core.engine.handle_fault", lambda submit, config: ""),
    ):
        yield


@bug("calm", "wrong_token", report="vllm-project/vllm#52617")
def block_order_is_swapped() -> Iterator[None]:
    """The last two blocks of a pull go into each other's place."""

    def make(real: Any) -> Any:
        def begin_pull(self: KVManager, sequence: Any, count: int) -> Any:
            blocks = real(self, sequence, count)
            return (*blocks[:-2], *reversed(blocks[-2:]))

        return begin_pull

    with wrapped(KVManager, "begin_pull", make):
        yield


@bug("wild", "two_writers", "wrong_token", report="vllm-project/vllm#5543")
def blocks_are_cached_before_they_are_computed() -> Iterator[None]:
    """A prompt's blocks enter the prefix cache when they are allocated."""

    def make(real: Any) -> Any:
        def admit(self: KVManager, sequence: Any, hits: Any) -> None:
            real(self, sequence, hits)
            computed, sequence.computed = sequence.computed, len(sequence.tokens)
            self.publish_computed(sequence)
            sequence.computed = computed

        return admit

    with wrapped(KVManager, "admit", make):
        yield


@bug("drifting", "tenants", report="vllm-project/vllm#29163")
def salt_is_missing_from_the_block_hash() -> Iterator[None]:
    """Tenants share blocks of equal prompts."""
    with patch.object(KeyExtras, "canonical", lambda self: b""):
        yield


@bug("calm", "two_writers")
def partial_block_is_shared_by_forks() -> Iterator[None]:
    """Choices that fork off one prompt write into one and the same last block."""

    def make(real: Any) -> Any:
        def fork(self: KVManager, root: Any, child: Any) -> None:
            real(self, root, child)
            target = child.table[-1]
            source = self._copies.pop(target, None)
            if source is not None:  # the copy's reference on the source becomes the child's
                child.table[-1] = source
                self.pool.release((target,))

        return fork

    with wrapped(KVManager, "fork", make):
        yield
