"""The reads in flight of one engine: which pulls the back ends work on, which wait for a place, and how far each is.

Used by one thread at a time. What happens to a read is returned as events for its flow.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry_runtime.core.messages import LegKey
from kvferry_runtime.transfer.backends.base import BackendError, ReadJob, ReadState, TransferBackend
from kvferry_runtime.transfer.flow import TransferFlow
from kvferry_runtime.transfer.flow_messages import (
    BytesArrived,
    FlowEvent,
    ReadDone,
    ReadStarted,
    ReadStopped,
    ReleaseSent,
)
from kvferry_runtime.transfer.handshake import PeerKey
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import LeaseRef
from kvferry_wire.handle import KVHandle

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Pull:
    """One leg's lease and what is done with it. `backend` and `read` are set while a read runs."""

    key: LegKey
    handle: KVHandle
    lease: LeaseRef
    peer: PeerKey
    flow: TransferFlow
    blocks: tuple[tuple[int, ...], ...] = ()
    release_id: int = 0
    backend: TransferBackend | None = None
    read: object | None = None
    arrived: int = 0
    releasing: bool = False
    next_poll: float = 0.0


class ReadSlots:
    """At most `places` reads at once; the others wait in the order in which they came.

    Args:
        backends: available ones, by name, in order of preference.
        reader: this engine's incarnation.
    """

    def __init__(self, backends: Mapping[str, TransferBackend], places: int, *, reader: bytes) -> None:
        self._backends = backends
        self._reader = reader
        self._places = places
        self._queued: deque[Pull] = deque()
        self._running: list[Pull] = []
        # By what handles say of how to reach a peer: one entry per peer, unless a peer contradicts itself.
        self._peers: dict[PeerKey, dict[tuple[str, bytes], object]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def enqueue(self, pull: Pull) -> None:
        """The pull's blocks are to be read."""
        self._queued.append(pull)

    def stop(self, pull: Pull) -> bool:
        """End a read soon; `poll` tells when. False: it had not begun, and never will."""
        if pull.backend is None or pull.read is None:
            self._queued.remove(pull)
            return False
        pull.backend.stop(pull.read)
        pull.next_poll = 0.0
        return True

    def start_next(self, now: float) -> tuple[Pull, FlowEvent] | None:
        """Begin the next read, if there is one and a place for it."""
        if not self._queued or len(self._running) >= self._places:
            return None
        pull = self._queued.popleft()
        try:
            backend, peer = self._backend_for(pull)
            job = ReadJob(pull.lease, pull.blocks, pull.handle.checksums, self._reader, pull.release_id)
            pull.read = backend.read(peer, job)
        except BackendError as error:
            _log.warning("a pull cannot begin: %s", error)
            return pull, ReadStopped(RecomputeReason.NO_BACKEND)
        pull.backend = backend
        pull.next_poll = now + backend.poll_interval_s
        self._running.append(pull)
        return pull, ReadStarted()

    def poll(self, now: float) -> list[tuple[Pull, FlowEvent]]:
        """What has happened to the running reads."""
        happened: list[tuple[Pull, FlowEvent]] = []
        for pull in tuple(self._running):
            assert pull.backend is not None
            status = pull.backend.poll(pull.read)
            pull.next_poll = now + pull.backend.poll_interval_s
            if status.nbytes != pull.arrived:
                pull.arrived = status.nbytes
                happened.append((pull, BytesArrived(status.nbytes)))
            if status.releasing and not pull.releasing:
                pull.releasing = True
                happened.append((pull, ReleaseSent()))
            if status.state is ReadState.RUNNING:
                continue
            pull.backend.release(pull.read)
            pull.backend = pull.read = None
            self._running.remove(pull)
            if status.state is ReadState.DONE:
                happened.append((pull, ReadDone(status.answer)))
            else:
                level = logging.WARNING if status.reason is RecomputeReason.CHECKSUM else logging.INFO
                _log.log(level, "a read of %s ended early: %s", pull.peer.host, status.detail)
                happened.append((pull, ReadStopped(status.reason)))
        return happened

    def next_poll(self) -> float:
        """When `poll` is due next."""
        return min((pull.next_poll for pull in self._running), default=float("inf"))

    def forget(self, key: PeerKey) -> None:
        """Close what the back ends keep open to a peer. No pull uses it."""
        for (name, _), known in self._peers.pop(key, {}).items():
            self._backends[name].forget(known)

    def _backend_for(self, pull: Pull) -> tuple[TransferBackend, object]:
        for name, backend in self._backends.items():
            descriptor = pull.handle.backends.get(name)
            if descriptor is None:
                continue
            reached = self._peers.setdefault(pull.peer, {})
            if (name, descriptor) not in reached:
                reached[name, descriptor] = backend.connect(pull.peer.incarnation, pull.peer.host, descriptor)
            return backend, reached[name, descriptor]
        raise BackendError(f"backends: the peer has {sorted(pull.handle.backends)}, we have {sorted(self._backends)}")
