"""The owner's half of the tcp back end: proves its peers, then serves reads that each name their lease.

One thread accepts and runs the challenges without blocking; each proved connection then has a thread of its own, which
asks the lease table before every answer, and takes no request before the bytes for the last one have been copied. What
is sent after a lease ended is void by the protocol: the reader believes bytes only if its `Release`, which may come
here behind its last request, is answered ``held``.
"""

import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvferry_runtime.transfer.backends.base import BackendError
from kvferry_runtime.transfer.backends.tcp_link import Link, LinkError
from kvferry_runtime.transfer.lease import Lookup
from kvferry_runtime.transfer.memory import BlockMemory
from kvferry_runtime.transfer.ranges import requested_blocks
from kvferry_wire.control import LeaseAnswer, LeaseRef
from kvferry_wire.data import (
    NONCE_BYTES,
    PROOF_BYTES,
    DataRequest,
    ReadReply,
    ReleaseRequest,
    decode_request,
    encode,
    proof,
)
from kvferry_wire.keys import mac_equal
from kvferry_wire.limits import Limits

_log = logging.getLogger(__name__)

_ACCEPT_PAUSE_S = 0.02
_FINISH_S = 0.5  # for readers that have been promised bytes already


@dataclass(slots=True)
class _Unproved:
    """A connection within its challenge."""

    sock: socket.socket
    nonce: bytes
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class DataServer:
    """Listens on the data port.

    Args:
        lookup: the blocks of a lease now; called from many threads, as is the next.
        release: a reader (incarnation, message id) has read all of a lease.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        kv_key: bytes,
        limits: Limits,
        lookup: Callable[[LeaseRef], Lookup],
        release: Callable[[bytes, int, LeaseRef], LeaseAnswer],
        memory: BlockMemory,
    ) -> None:
        self._address = (host, port)
        self._kv_key = kv_key
        self._limits = limits
        self._lookup = lookup
        self._release = release
        self._memory = memory
        self._unproved: dict[socket.socket, _Unproved] = {}
        self._lock = threading.Lock()  # guards what follows
        self._links: dict[Link, threading.Thread] = {}
        self._sent = 0
        self._dropped = 0
        self._closing = False
        self.failure = ""  # why the accepting thread has died

    def start(self) -> None:
        """Bind and serve. Raises `BackendError` when the address cannot be bound."""
        try:
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            self._listener = socket.create_server(self._address, family=family, backlog=128)
        except OSError as error:
            host, port = self._address
            raise BackendError(f"data port: cannot listen on {host}:{port}: {error.strerror}") from error
        self._listener.setblocking(False)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._acceptor = threading.Thread(target=self._run, name="kv-data-accept", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    @property
    def sent(self) -> int:
        """Payload bytes sent."""
        return self._sent

    @property
    def dropped(self) -> int:
        """Connections closed for a fault of the peer."""
        return self._dropped

    def close(self, timeout: float) -> None:
        """Accept no more, let answers under way come to their end for a moment, cut what is left, end the threads."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closing = True
            threads = list(self._links.values())
            for link in self._links:  # under the lock: a thread closes its link only after it left the table
                link.end_reading()
        self._wake_sender.send(b"x")
        self._acceptor.join(timeout)
        finished = min(deadline, time.monotonic() + _FINISH_S)
        for thread in threads:
            thread.join(max(0.0, finished - time.monotonic()))
        with self._lock:
            for link in self._links:
                link.abort()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._wake_sender.close()
        self._wake_receiver.close()
        self._listener.close()

    # ---- accepting and proving -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._accept_loop()
        except Exception as error:  # noqa: BLE001 - kept, and raised by `TransferService.check_alive`
            self.failure = f"{type(error).__name__}: {error}"
            _log.exception("the data port's thread has died")

    def _accept_loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            while not self._closing:
                timeout = None
                if self._unproved:
                    soonest = min(entry.deadline for entry in self._unproved.values())
                    timeout = max(0.0, soonest - time.monotonic())
                for key, _ in selector.select(timeout):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.data, _Unproved) and key.data.sock in self._unproved:
                        self._challenge(selector, key.data)
                now = time.monotonic()
                for entry in [entry for entry in self._unproved.values() if entry.deadline <= now]:
                    self._drop(selector, entry, "not proved in time")
            for entry in tuple(self._unproved.values()):
                entry.sock.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # The peer left between the event and the call, or no descriptor is free: then the listener stays ready,
            # and asking it at once would spin.
            _log.warning("a data connection cannot be accepted: %s", error.strerror)
            time.sleep(_ACCEPT_PAUSE_S)
            return
        if len(self._unproved) >= self._limits.data_connections:
            # A peer with the key proves it at once, so the one that has waited longest is the least likely to.
            self._drop(selector, next(iter(self._unproved.values())), "too many unproved connections")
        sock.setblocking(False)
        deadline = time.monotonic() + self._limits.challenge_s
        entry = _Unproved(sock, secrets.token_bytes(NONCE_BYTES), deadline)
        self._unproved[sock] = entry
        selector.register(sock, selectors.EVENT_READ, entry)
        try:
            sock.send(entry.nonce)
        except OSError as error:
            self._drop(selector, entry, str(error))

    def _challenge(self, selector: selectors.BaseSelector, entry: _Unproved) -> None:
        expected = NONCE_BYTES + PROOF_BYTES
        try:
            data = entry.sock.recv(expected - len(entry.received))
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(selector, entry, str(error))
            return
        if not data:
            self._drop(selector, entry, "closed before its proof")
            return
        entry.received += data
        if len(entry.received) < expected:
            return
        theirs, given = bytes(entry.received[:NONCE_BYTES]), bytes(entry.received[NONCE_BYTES:])
        if not mac_equal(given, proof(self._kv_key, "reader", theirs, entry.nonce)):
            self._drop(selector, entry, "does not hold the kv key")
            return
        if len(self._links) >= self._limits.data_connections:
            self._drop(selector, entry, f"data_connections: {self._limits.data_connections} are open")
            return
        selector.unregister(entry.sock)
        del self._unproved[entry.sock]
        self._serve(entry, proof(self._kv_key, "owner", entry.nonce, theirs))

    def _drop(self, selector: selectors.BaseSelector, entry: _Unproved, why: str) -> None:
        selector.unregister(entry.sock)
        del self._unproved[entry.sock]
        entry.sock.close()
        self._count_drop(why)

    def _count_drop(self, why: str) -> None:
        with self._lock:
            self._dropped += 1
        _log.warning("data connection dropped: %s", why)

    # ---- serving -------------------------------------------------------------------------------------------------

    def _serve(self, entry: _Unproved, own_proof: bytes) -> None:
        link = Link(entry.sock, self._limits)
        thread = threading.Thread(target=self._serve_link, args=(link, own_proof), name="kv-data-serve", daemon=True)
        with self._lock:
            if self._closing:
                link.close()
                return
            self._links[link] = thread
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads
                del self._links[link]
                link.close()
                _log.warning("data connection dropped: no thread can be started for it")

    def _serve_link(self, link: Link, own_proof: bytes) -> None:
        try:
            link.send([memoryview(own_proof)])
            while True:
                link.wait_message(self._limits.peer_ttl_s)
                self._answer(link, decode_request(link.receive_message()))
        except LinkError as error:
            _log.debug("data connection ended: %s", error)
        except msgspec.DecodeError as error:
            self._count_drop(f"not a read request: {error}")
        finally:
            with self._lock:
                del self._links[link]
            link.close()

    def _answer(self, link: Link, request: DataRequest) -> None:
        if isinstance(request, ReleaseRequest):
            answer = self._release(request.reader, request.id, request.lease)
            link.send_message(encode(ReadReply("ok" if answer == "held" else answer, 0)))
            return
        ref = LeaseRef(request.lease_id, request.incarnation, request.epoch, request.prompt_digest)
        found = self._lookup(ref)
        if found.answer != "held":
            link.send_message(encode(ReadReply(found.answer, 0)))
            return
        block_ids = requested_blocks(request, found.blocks, self._limits)
        if block_ids is None:
            link.send_message(encode(ReadReply("invalid", 0)))
            return
        payload = [self._memory.block(request.group, block_id) for block_id in block_ids]
        nbytes = sum(part.nbytes for part in payload)
        link.send_message(encode(ReadReply("ok", nbytes)), payload)
        with self._lock:
            self._sent += nbytes
