"""The tcp back end: plain sockets, no dependency. Blocks go from the owner's memory into the reader's without a copy in
between on our side: scatter-gather system calls on both.

A read runs on one of `Limits.transfers` threads, over a connection that is kept for the next read from the same peer.
Requests are sent ahead of the answers, so that the owner always has one to work on.
"""

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from dataclasses import dataclass, field

import msgspec

from kvferry_runtime.transfer.backends.base import (
    BackendContext,
    BackendError,
    ReadJob,
    ReadState,
    ReadStatus,
)
from kvferry_runtime.transfer.backends.tcp_link import Link, LinkError
from kvferry_runtime.transfer.backends.tcp_server import DataServer
from kvferry_runtime.transfer.checksums import CHECKED_AT_ONCE, first_damaged
from kvferry_runtime.transfer.memory import BlockMemory
from kvferry_runtime.transfer.ranges import BlockRange, read_ranges
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import LeaseAnswer
from kvferry_wire.data import ReadReply, ReadRequest, ReleaseRequest, decode_reply, encode
from kvferry_wire.layout import LayoutDescriptor

WINDOW = 3  # requests sent ahead
_CONNECT_SLICE_S = 0.1

_log = logging.getLogger(__name__)

# `invalid` is no answer to a release.
_RELEASE_ANSWER: dict[str, LeaseAnswer] = {"ok": "held", "expired": "expired", "unknown": "unknown"}
_STATUS_REASON = {
    "expired": RecomputeReason.LEASE_EXPIRED,
    "unknown": RecomputeReason.LEASE_UNKNOWN,
    "invalid": RecomputeReason.READ_ERROR,
}


class TcpDescriptor(msgspec.Struct, frozen=True):
    """What handles carry: the port; the host is the handle's."""

    port: int


_decode_descriptor = msgspec.msgpack.Decoder(TcpDescriptor).decode


@dataclass(eq=False, slots=True)
class TcpPeer:
    """Where a peer listens, and the connections to it that no read uses now."""

    host: str
    port: int
    idle: list[Link] = field(default_factory=list)
    forgotten: bool = False


@dataclass(eq=False, slots=True)
class TcpRead:
    """One read. Written by its thread; `lock` guards `link` and `stopped`."""

    peer: TcpPeer
    job: ReadJob
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: Link | None = None
    stopped: bool = False
    nbytes: int = 0
    releasing: bool = False  # the release is on its way, or was
    answer: LeaseAnswer | None = None  # to it
    end: ReadStatus | None = None


class _ReadFailedError(Exception):
    def __init__(self, reason: RecomputeReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TcpBackend:
    """See `backends.base.TransferBackend`."""

    name = "tcp"
    poll_interval_s = 0.1  # ends are told by `wake`; this is for progress

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._limits = context.limits
        self._release_s = min(context.limits.control_reply_s, context.limits.transfer_floor_s / 4)
        self._jobs: queue.SimpleQueue[TcpRead | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards the peers' idle links and the running reads
        self._running: set[TcpRead] = set()
        self._peers: set[TcpPeer] = set()
        self._closed = False

    def register(self, memory: BlockMemory, layout: LayoutDescriptor) -> None:
        """The memory that blocks lie in, for both roles."""
        self._memory = memory
        self._block_bytes = tuple(group.block_bytes(layout.block_size) for group in layout.groups)

    def start(self) -> None:
        """Listen. Raises `BackendError`."""
        self._server = DataServer(
            host=self._context.bind_host,
            port=self._context.port,
            kv_key=self._context.kv_key,
            limits=self._limits,
            lookup=self._context.lookup,
            release=self._context.release,
            memory=self._memory,
        )
        self._server.start()

    def describe(self) -> bytes:
        """A `TcpDescriptor`."""
        return encode(TcpDescriptor(self._server.port))

    def connect(self, incarnation: bytes, host: str, descriptor: bytes) -> TcpPeer:
        """A peer; connections are made by the first reads."""
        try:
            port = _decode_descriptor(descriptor).port
        except msgspec.DecodeError as error:
            raise BackendError(f"tcp descriptor: {error}") from error
        if not 0 < port < 2**16:
            raise BackendError(f"tcp descriptor: port {port} given; 1..65535 are accepted")
        peer = TcpPeer(host, port)
        with self._lock:
            self._peers.add(peer)
        return peer

    def read(self, peer: object, job: ReadJob) -> TcpRead:
        """Begin to fill the blocks, on a thread of the back end."""
        assert isinstance(peer, TcpPeer)
        read = TcpRead(peer, job)
        with self._lock:
            if self._closed:
                raise BackendError("the tcp back end is closed")
            self._running.add(read)
            if len(self._threads) < self._limits.transfers:
                name = f"kv-pull-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(read)
        return read

    def poll(self, handle: object) -> ReadStatus:
        """How far a read is."""
        assert isinstance(handle, TcpRead)
        return handle.end or ReadStatus(ReadState.RUNNING, handle.nbytes, releasing=handle.releasing)

    def stop(self, handle: object) -> None:
        """Cut the read's connection; its thread then ends it."""
        assert isinstance(handle, TcpRead)
        with handle.lock:
            handle.stopped = True
            if handle.link is not None:
                handle.link.abort()

    def release(self, handle: object) -> None:
        """Forget a read that has ended."""
        assert isinstance(handle, TcpRead) and handle.end is not None
        with self._lock:
            self._running.discard(handle)

    def forget(self, peer: object) -> None:
        """Close the idle connections to a peer, and those that a read gives back later."""
        assert isinstance(peer, TcpPeer)
        with self._lock:
            peer.forgotten = True
            idle, peer.idle = peer.idle, []
            self._peers.discard(peer)
        for link in idle:
            link.close()

    def port(self) -> int:
        """The data port."""
        return self._server.port

    def sent_bytes(self) -> int:
        """Bytes sent to readers."""
        return self._server.sent

    def dropped_connections(self) -> int:
        """Connections closed for a fault of the peer."""
        return self._server.dropped

    def fault(self) -> str:
        """Why the data port is not served any more."""
        return self._server.failure

    def close(self, timeout: float) -> None:
        """Cut every read, end the threads, stop listening."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            running, peers, threads = set(self._running), set(self._peers), list(self._threads)
        for read in running:
            self.stop(read)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for peer in peers:
            self.forget(peer)
        self._server.close(max(0.5, deadline - time.monotonic()))

    # ---- on the reads' threads -----------------------------------------------------------------------------------

    def _work(self) -> None:
        while (read := self._jobs.get()) is not None:
            end = ReadStatus(ReadState.FAILED, read.nbytes, RecomputeReason.READ_ERROR, "internal fault")
            try:
                self._fill(read)
                end = ReadStatus(ReadState.DONE, read.nbytes, answer=read.answer)
            except _ReadFailedError as error:
                end = ReadStatus(ReadState.FAILED, read.nbytes, error.reason, str(error))
            except LinkError as error:
                end = ReadStatus(ReadState.FAILED, read.nbytes, RecomputeReason.READ_ERROR, str(error))
            except Exception:  # noqa: BLE001 - it fails this read, whose end names it; the thread serves the next
                _log.exception("a read ended by a fault of this process")
            finally:
                # The last act: from here on nothing of this read writes into its blocks.
                read.end = end
                self._context.wake()

    def _fill(self, read: TcpRead) -> None:
        # Over one connection, whatever happens to it: the owner's order of read and release holds for one alone.
        link = self._open(read)
        try:
            self._transfer(read, link)
            read.answer = self._release_answer(link)
        except BaseException:
            self._attach(read, None)
            link.close()
            raise
        self._attach(read, None)
        if read.answer is None:  # whatever comes on it now may be the answer
            link.close()
        else:
            self._keep(read.peer, link)

    def _transfer(self, read: TcpRead, link: Link) -> None:
        """Read all ranges, and ask for the release behind them: the owner takes it when it has copied all bytes."""
        self._attach(read, link)
        job, lease, blocks = read.job, read.job.lease, read.job.blocks
        ranges = read_ranges([len(group) for group in blocks], self._block_bytes, self._limits)
        requests = [
            encode(
                ReadRequest(
                    incarnation=lease.incarnation,
                    epoch=lease.epoch,
                    lease_id=lease.lease_id,
                    prompt_digest=lease.prompt_digest,
                    group=part.group,
                    first=part.first,
                    count=part.count,
                )
            )
            for part in ranges
        ]
        requests.append(encode(ReleaseRequest(reader=job.reader, id=job.release_id, lease=lease)))
        asked = 0
        for received in range(len(requests)):
            if received:
                self._receive_range(read, link, ranges[received - 1])
            ahead = requests[asked : received + WINDOW]
            asked += len(ahead)
            if ahead:
                read.releasing = asked == len(requests)  # before the owner hears of it
                link.send_messages(ahead)

    def _receive_range(self, read: TcpRead, link: Link, part: BlockRange) -> None:
        try:
            reply: ReadReply = decode_reply(link.receive_message())
        except msgspec.DecodeError as error:
            raise LinkError(f"not a read reply: {error}") from error
        if reply.status != "ok":
            raise _ReadFailedError(_STATUS_REASON[reply.status], f"the peer answered {reply.status}")
        expected = part.count * self._block_bytes[part.group]
        if reply.nbytes != expected:
            raise LinkError(f"nbytes: {reply.nbytes}; {part.count} blocks of group {part.group} have {expected}")
        ids = read.job.blocks[part.group][part.first : part.first + part.count]

        def arrived(count: int) -> None:
            read.nbytes += count

        step = max(1, CHECKED_AT_ONCE // self._block_bytes[part.group]) if read.job.checksums else len(ids)
        for start in range(0, len(ids), step):
            blocks = [self._memory.block(part.group, block_id) for block_id in ids[start : start + step]]
            link.receive(blocks, arrived=arrived)
            if read.job.checksums:
                damaged = first_damaged(blocks, read.job.checksums[part.group], part.first + start)
                if damaged is not None:
                    detail = f"block {damaged} of group {part.group} is not what its owner granted"
                    raise _ReadFailedError(RecomputeReason.CHECKSUM, detail)

    def _release_answer(self, link: Link) -> LeaseAnswer | None:
        """What comes behind the last byte. ``None``: no answer in time; the flow asks again by its own way."""
        try:
            reply: ReadReply = decode_reply(link.receive_message(deadline=time.monotonic() + self._release_s))
        except (LinkError, msgspec.DecodeError) as error:
            _log.debug("a release is not answered on the data connection: %s", error)
            return None
        return _RELEASE_ANSWER.get(reply.status)

    # ---- connections ---------------------------------------------------------------------------------------------

    def _open(self, read: TcpRead) -> Link:
        """A kept connection that was not cut while nobody used it, or a new one."""
        while True:
            with self._lock:
                link = read.peer.idle.pop() if read.peer.idle else None
            if link is None:
                return self._connect(read)
            if link.is_quiet():
                return link
            link.close()

    def _connect(self, read: TcpRead) -> Link:
        try:
            link = Link(_connect_socket(read, self._limits.connect_s), self._limits)
        except OSError as error:
            raise _ReadFailedError(RecomputeReason.CONNECT, f"{read.peer.host}:{read.peer.port}: {error}") from error
        try:
            self._attach(read, link)
            link.prove_as_reader(self._context.kv_key)
        except LinkError as error:
            self._attach(read, None)
            link.close()
            raise _ReadFailedError(RecomputeReason.CONNECT, f"{read.peer.host}:{read.peer.port}: {error}") from error
        return link

    def _attach(self, read: TcpRead, link: Link | None) -> None:
        """Let `stop` reach the connection that the read waits for."""
        with read.lock:
            read.link = link
            if link is not None and read.stopped:
                link.abort()

    def _keep(self, peer: TcpPeer, link: Link) -> None:
        with self._lock:
            if not peer.forgotten and not self._closed and len(peer.idle) < self._limits.transfers:
                peer.idle.append(link)
                return
        link.close()


def _connect_socket(read: TcpRead, timeout: float) -> socket.socket:
    """Connect; a stop ends the wait. Raises `OSError`."""
    deadline = time.monotonic() + timeout
    family, kind, _, _, address = socket.getaddrinfo(read.peer.host, read.peer.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind)
    with contextlib.ExitStack() as on_error:
        on_error.callback(sock.close)
        sock.setblocking(False)
        sock.connect_ex(address)
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        while not poller.poll(_CONNECT_SLICE_S * 1000):
            if read.stopped:
                raise ConnectionAbortedError("stopped")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not connected in {timeout:g} s")
        failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, "connection failed")
        on_error.pop_all()
    return sock
