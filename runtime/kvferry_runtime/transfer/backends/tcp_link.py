"""One connection of the tcp back end: options, the mutual proof, whole messages, and scattered payload.

Sockets are blocking with a short kernel time-out, so that filling many blocks is one system call and yet no call blocks
for long. A message is received together with whatever is here behind it, up to `READ_AHEAD` bytes: a short transfer is
one system call for all its messages and blocks. One thread owns a link and closes it; any other may `abort` it, which
ends what the owner waits for at once.
"""

import contextlib
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from kvferry_wire.data import NONCE_BYTES, PROOF_BYTES, proof
from kvferry_wire.keys import mac_equal
from kvferry_wire.limits import Limits

HEAD = struct.Struct("<I")
SLICE_S = 0.25  # a system call returns at least so often
MAX_BUFFERS = 512  # of one system call; Linux takes 1024
READ_AHEAD = 16 * 1024  # bytes; what is payload of them is copied once more
_TIMEVAL = struct.Struct("@ll")


class LinkError(ConnectionError):
    """The connection is of no use any more: closed, stalled, not proved, or it carried what is no message."""


class Link:
    """A connected TCP socket, owned by the link from now on."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock = sock
        self._limits = limits
        self._ahead = memoryview(b"")  # received, not taken yet
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The buffers' sizes are left to the kernel: a size set by hand is capped low and ends its auto-tuning.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(0, int(SLICE_S * 1e6)))

    def prove_as_reader(self, kv_key: bytes) -> None:
        """The reader's half of the challenge. Raises `LinkError` unless the owner holds the key too."""
        deadline = time.monotonic() + self._limits.challenge_s
        nonce, theirs, answer = secrets.token_bytes(NONCE_BYTES), bytearray(NONCE_BYTES), bytearray(PROOF_BYTES)
        self.send([memoryview(nonce)])
        self.receive([memoryview(theirs)], deadline=deadline)
        self.send([memoryview(proof(kv_key, "reader", nonce, bytes(theirs)))])
        self.receive([memoryview(answer)], deadline=deadline)
        if not mac_equal(bytes(answer), proof(kv_key, "owner", bytes(theirs), nonce)):
            raise LinkError("the peer does not hold the kv key")

    def is_quiet(self) -> bool:
        """Whether the peer has neither closed it nor sent what nobody has asked for."""
        if self._ahead:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass  # it was reset
        return False

    def send_message(self, body: bytes, payload: Sequence[memoryview] = ()) -> None:
        """Send a length-prefixed message and the bytes after it."""
        self.send([memoryview(HEAD.pack(len(body)) + body), *payload])

    def send_messages(self, bodies: Sequence[bytes]) -> None:
        """Send length-prefixed messages in one system call."""
        self.send([memoryview(b"".join(HEAD.pack(len(body)) + body for body in bodies))])

    def wait_message(self, idle_s: float) -> None:
        """Return when a message has begun to arrive. Raises `LinkError` after `idle_s`."""
        if self._ahead:
            return
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if not poller.poll(idle_s * 1000):
            raise LinkError(f"idle for {idle_s:g} s")

    def receive_message(self, *, deadline: float | None = None) -> bytes:
        """Receive one length-prefixed message. `deadline` is on `time.monotonic`."""
        (length,) = HEAD.unpack(self._take(HEAD.size, deadline))
        if not 0 < length <= self._limits.data_message_bytes:
            raise LinkError(f"a message of {length} bytes; 1..{self._limits.data_message_bytes} are accepted")
        return self._take(length, deadline)

    def send(self, buffers: Sequence[memoryview]) -> None:
        """Send all bytes of all buffers."""
        queue = BufferQueue(buffers)
        moved_at = time.monotonic()
        while queue.left:
            try:
                sent = self._sock.sendmsg(queue.head())
            except BlockingIOError:
                self._check_stall(moved_at)
                continue
            except OSError as error:
                raise LinkError(f"send: {error}") from error
            queue.advance(sent)
            moved_at = time.monotonic()

    def receive(
        self,
        buffers: Sequence[memoryview],
        *,
        deadline: float | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """Fill all buffers. `arrived` hears the size of each piece; `deadline` is on `time.monotonic`."""
        queue = BufferQueue(buffers)
        if self._ahead:
            count = queue.fill(self._ahead)
            self._ahead = self._ahead[count:]
            if arrived is not None:
                arrived(count)
        moved_at = time.monotonic()
        while queue.left:
            if count := self._receive_some(queue.head(), socket.MSG_WAITALL):
                queue.advance(count)
                moved_at = time.monotonic()
                if arrived is not None:
                    arrived(count)
            if queue.left:
                self._check_time(moved_at, deadline)

    def end_reading(self) -> None:
        """From any thread: the owning thread receives the end as soon as nothing else is here; it may still send."""
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RD)

    def abort(self) -> None:
        """From any thread: what the owning thread waits for ends at once, and so does every later wait."""
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the owning thread: give the descriptor back."""
        self.abort()
        self._sock.close()

    def _take(self, count: int, deadline: float | None) -> bytes:
        """So many bytes, with what is here behind them left for the next call."""
        moved_at = time.monotonic()
        while len(self._ahead) < count:
            room = bytearray(READ_AHEAD)
            if received := self._receive_some([memoryview(room)]):
                self._ahead = memoryview(bytes(self._ahead) + room[:received])
                moved_at = time.monotonic()
            if len(self._ahead) < count:
                self._check_time(moved_at, deadline)
        taken = bytes(self._ahead[:count])
        self._ahead = self._ahead[count:]
        return taken

    def _receive_some(self, buffers: Sequence[memoryview], flags: int = 0) -> int:
        """How many bytes came; 0 when none did in a slice of time."""
        try:
            count = self._sock.recvmsg_into(buffers, 0, flags)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkError(f"receive: {error}") from error
        if count == 0:
            raise LinkError("the peer closed the connection")
        return count

    def _check_time(self, moved_at: float, deadline: float | None) -> None:
        self._check_stall(moved_at)
        if deadline is not None and time.monotonic() >= deadline:
            raise LinkError("not in time")

    def _check_stall(self, moved_at: float) -> None:
        if time.monotonic() - moved_at >= self._limits.transfer_stall_s:
            raise LinkError(f"nothing moved for {self._limits.transfer_stall_s:g} s")


class BufferQueue:
    """Buffers that system calls fill or send in part, first to last."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [part for part in buffers if part.nbytes]
        self._first = 0
        self.left = sum(part.nbytes for part in self._buffers)

    def head(self) -> list[memoryview]:
        """As many buffers as one call takes, from the first byte that is left."""
        return self._buffers[self._first : self._first + MAX_BUFFERS]

    def fill(self, data: memoryview) -> int:
        """Copy what there is room for. Returns how many bytes that were."""
        copied = 0
        while self.left and copied < data.nbytes:
            target = self._buffers[self._first]
            count = min(target.nbytes, data.nbytes - copied)
            target[:count] = data[copied : copied + count]
            self.advance(count)
            copied += count
        return copied

    def advance(self, nbytes: int) -> None:
        """So many bytes are done."""
        self.left -= nbytes
        while nbytes:
            first = self._buffers[self._first]
            if nbytes < first.nbytes:
                self._buffers[self._first] = first[nbytes:]
                return
            nbytes -= first.nbytes
            self._first += 1
