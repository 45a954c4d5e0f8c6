"""What a transfer back end is: it moves bytes of leased blocks, and decides nothing.

Handshake, leases, renewal, deadlines, retries, failure and metrics are written once, above. A back end pulls. Its calls
are made by one thread at a time and return at once; the bytes move elsewhere (threads, a NIC). Order of calls:

    register, start                            once, before anything else
    describe                                   what handles and handshakes carry about it
    connect                                    per peer, before its first read; cheap, connects lazily
    read, poll..., [stop, poll...], release    per pull; `release` only after `poll` said that it has ended
    forget                                     per peer, when no read to it is in flight
    close                                      once; nothing writes into any block after it returned
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry_runtime.transfer.lease import Lookup
from kvferry_runtime.transfer.memory import BlockMemory
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import LeaseAnswer, LeaseRef
from kvferry_wire.layout import LayoutDescriptor
from kvferry_wire.limits import Limits


class ReadState(enum.Enum):
    """Of one read."""

    RUNNING = "running"
    DONE = "done"  # all bytes are in the blocks; nothing writes any more
    FAILED = "failed"  # ended early; nothing writes any more


@dataclass(frozen=True, slots=True)
class ReadStatus:
    """`nbytes`: that have arrived. `reason` and `detail` (for the log) are set when the read failed.

    `releasing`: the back end has asked the owner for all bytes and, behind them, to release the lease: the owner may
    have ended it, although bytes are still on their way. `answer`: of a read that is done, what the owner said to that;
    ``None`` where it was not asked, or has not answered.
    """

    state: ReadState
    nbytes: int
    reason: RecomputeReason = RecomputeReason.READ_ERROR
    detail: str = ""
    releasing: bool = False
    answer: LeaseAnswer | None = None


@dataclass(frozen=True, slots=True)
class ReadJob:
    """All blocks of a lease, into these local blocks: ids per KV group, in the lease's own order.

    Where there are `checksums` (see `transfer.checksums`; one entry per group) the back end checks each block before it
    says that it is done: a damaged one ends the read with `RecomputeReason.CHECKSUM`. A back end whose owner takes one
    request after another, each when it has copied the bytes of those before, sends a `Release` with `reader` and
    `release_id` behind the last one; whoever repeats it uses the same two.
    """

    lease: LeaseRef
    blocks: tuple[tuple[int, ...], ...]
    checksums: tuple[bytes, ...] = ()
    reader: bytes = b""
    release_id: int = 0


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a back end is given. `lookup` and `wake` may be called from any thread.

    `lookup`: the blocks of a lease now, if it is live. `release`: all of it has been copied to a reader (reader,
    message id, lease). `wake`: a read has progressed or ended; it may call the back end on this very thread, so no
    lock may be held that a call takes.
    """

    kv_key: bytes
    limits: Limits
    bind_host: str
    port: int  # to listen on; 0 for any, unused by back ends without a port
    lookup: Callable[[LeaseRef], Lookup]
    release: Callable[[bytes, int, LeaseRef], LeaseAnswer]
    wake: Callable[[], None]


class BackendError(RuntimeError):
    """A peer's descriptor cannot be used, or the back end cannot work at all; the message says why."""


class TransferBackend(Protocol):
    """See the module's text."""

    name: str
    poll_interval_s: float  # how often a running read wants to be polled, besides `wake`

    def register(self, memory: BlockMemory, layout: LayoutDescriptor) -> None:
        """The memory that blocks lie in, for both roles."""
        ...

    def start(self) -> None:
        """Begin to serve reads. Raises `BackendError`."""
        ...

    def describe(self) -> bytes:
        """What a peer needs to read from here; opaque to all but the same back end."""
        ...

    def connect(self, incarnation: bytes, host: str, descriptor: bytes) -> object:
        """A peer, for `read`. Raises `BackendError` when the descriptor is none of this back end's."""
        ...

    def read(self, peer: object, job: ReadJob) -> object:
        """Begin to fill the blocks."""
        ...

    def poll(self, handle: object) -> ReadStatus:
        """How far a read is."""
        ...

    def stop(self, handle: object) -> None:
        """Make a read end soon. It has ended when `poll` says so. Idempotent."""
        ...

    def release(self, handle: object) -> None:
        """Forget a read that has ended."""
        ...

    def forget(self, peer: object) -> None:
        """Close what is open to a peer."""
        ...

    def port(self) -> int:
        """The port it listens on, 0 if none."""
        ...

    def sent_bytes(self) -> int:
        """Bytes sent to readers."""
        ...

    def dropped_connections(self) -> int:
        """Connections that it closed for a fault of the peer."""
        ...

    def fault(self) -> str:
        """Why it has stopped working; empty while it works."""
        ...

    def close(self, timeout: float) -> None:
        """Stop all reads and serve no more."""
        ...
