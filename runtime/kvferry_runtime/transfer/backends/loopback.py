"""An in-process back end without sockets or threads, for tests and simulation.

Engines meet on a `LoopbackHub`. Each `poll` of a running read copies one block, after it asked the owner's lease table
as the tcp back end would, so that a test decides what happens between two blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry_runtime.transfer.backends.base import (
    BackendContext,
    BackendError,
    ReadJob,
    ReadState,
    ReadStatus,
)
from kvferry_runtime.transfer.checksums import first_damaged
from kvferry_runtime.transfer.lease import Lookup
from kvferry_runtime.transfer.memory import BlockMemory
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import LeaseRef
from kvferry_wire.layout import LayoutDescriptor


@dataclass(slots=True)
class LoopbackHub:
    """Who is reachable, by address. `cut` addresses refuse new reads and break running ones."""

    engines: dict[bytes, "LoopbackBackend"] = field(default_factory=dict)
    cut: set[bytes] = field(default_factory=set)

    def backend(self, address: bytes) -> Callable[[BackendContext], "LoopbackBackend"]:
        """A factory for the registry: the engine at this address."""
        return lambda context: LoopbackBackend(self, address, context.lookup)

    def reach(self, address: bytes) -> "LoopbackBackend | None":
        """The engine at an address, unless it is cut off or gone."""
        return None if address in self.cut else self.engines.get(address)


@dataclass(eq=False, slots=True)
class LoopbackRead:
    """One read."""

    address: bytes
    job: ReadJob
    left: list[tuple[int, int]]  # (group, index in the lease's order)
    nbytes: int = 0
    stopped: bool = False
    end: ReadStatus | None = None


class LoopbackBackend:
    """See `backends.base.TransferBackend`.

    Args:
        address: names this engine on the hub; also its descriptor.
        lookup: the blocks of a lease of this engine now.
    """

    name = "loopback"
    poll_interval_s = 0.001

    def __init__(self, hub: LoopbackHub, address: bytes, lookup: Callable[[LeaseRef], Lookup]) -> None:
        self._hub = hub
        self._address = address
        self._lookup = lookup
        self._sent = 0

    def register(self, memory: BlockMemory, layout: LayoutDescriptor) -> None:
        """The memory that blocks lie in, for both roles. The layout is not needed."""
        self.memory = memory

    def start(self) -> None:
        """Be reachable."""
        self._hub.engines[self._address] = self

    def describe(self) -> bytes:
        """The address on the hub."""
        return self._address

    def connect(self, incarnation: bytes, host: str, descriptor: bytes) -> bytes:
        """The address is all there is."""
        if not descriptor:
            raise BackendError("loopback descriptor: empty")
        return descriptor

    def read(self, peer: object, job: ReadJob) -> LoopbackRead:
        """Nothing is copied before the first `poll`."""
        assert isinstance(peer, bytes)
        left = [(group, index) for group, ids in enumerate(job.blocks) for index in range(len(ids))]
        return LoopbackRead(peer, job, left)

    def poll(self, handle: object) -> ReadStatus:
        """Copy one block."""
        assert isinstance(handle, LoopbackRead)
        if handle.end is None:
            handle.end = self._copy_one(handle)
        return handle.end or ReadStatus(ReadState.RUNNING, handle.nbytes)

    def stop(self, handle: object) -> None:
        """The next `poll` ends it."""
        assert isinstance(handle, LoopbackRead)
        handle.stopped = True

    def release(self, handle: object) -> None:
        """Nothing is kept."""

    def forget(self, peer: object) -> None:
        """Nothing is open."""

    def port(self) -> int:
        """It listens on none."""
        return 0

    def sent_bytes(self) -> int:
        """Bytes copied to readers."""
        return self._sent

    def dropped_connections(self) -> int:
        """There are none."""
        return 0

    def fault(self) -> str:
        """It has none."""
        return ""

    def close(self, timeout: float) -> None:
        """Be reachable no more."""
        self._hub.engines.pop(self._address, None)

    def serve(self, lease: LeaseRef, group: int, index: int) -> memoryview | RecomputeReason:
        """The owner's half: one block of a lease, or why not."""
        found = self._lookup(lease)
        if found.answer == "expired":
            return RecomputeReason.LEASE_EXPIRED
        if found.answer == "unknown":
            return RecomputeReason.LEASE_UNKNOWN
        if group >= len(found.blocks) or index >= len(found.blocks[group]):
            return RecomputeReason.READ_ERROR
        block = self.memory.block(group, found.blocks[group][index])
        self._sent += block.nbytes
        return block

    def _copy_one(self, read: LoopbackRead) -> ReadStatus | None:
        if read.stopped:
            return ReadStatus(ReadState.FAILED, read.nbytes, RecomputeReason.READ_ERROR, "stopped")
        owner = self._hub.reach(read.address)
        if owner is None:
            reason = RecomputeReason.READ_ERROR if read.nbytes else RecomputeReason.CONNECT
            return ReadStatus(ReadState.FAILED, read.nbytes, reason, "the peer is not reachable")
        group, index = read.left[0]
        source = owner.serve(read.job.lease, group, index)
        if isinstance(source, RecomputeReason):
            return ReadStatus(ReadState.FAILED, read.nbytes, source, "the peer refused the read")
        target = self.memory.block(group, read.job.blocks[group][index])
        target[:] = source
        read.nbytes += source.nbytes
        sums = read.job.checksums
        if sums and first_damaged((target,), sums[group], index) is not None:
            detail = f"block {index} of group {group} is damaged"
            return ReadStatus(ReadState.FAILED, read.nbytes, RecomputeReason.CHECKSUM, detail)
        del read.left[0]
        return None if read.left else ReadStatus(ReadState.DONE, read.nbytes)
