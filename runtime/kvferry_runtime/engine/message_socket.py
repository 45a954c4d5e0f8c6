"""Whole messages (``framing``) over a stream socket between the API server and its EngineCore.

Nothing here waits: what the kernel does not take at once
is kept in order, up to a number of messages, and leaves with ``flush``. One thread at a time may send, and one receive.
"""

import contextlib
import socket
from collections import deque

from kvferry_wire.framing import cut, framed

_READ = 256 * 2**10  # above what the kernel keeps by default
_MOST = 2**30  # bytes of a message: many times a snapshot of all blocks


class MessageSocket:
    """Owns ``end``, one end of a ``socket.socketpair``. ``limit``: messages that may wait to be sent."""

    def __init__(self, end: socket.socket, limit: int) -> None:
        end.setblocking(False)
        self._socket = end
        self._limit = limit
        self._leaving: deque[memoryview] = deque()
        self._broken: tuple[int, str] | None = None  # errno and words: why nothing can be sent any more
        self._arrived = bytearray()
        self.ended = False  # the other end is closed and all that it sent was received

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Send a message behind those that wait. False: as many wait as may, and this one was not taken.

        Raises ``OSError`` from the first error on, of whatever kind: what waited then is lost, and the other end sees
        the end of its socket, since what came behind half a message would be taken for its rest.
        """
        if self._broken is not None:
            raise OSError(*self._broken)
        if not self.has_room:
            return False
        self._leaving.append(memoryview(framed(message)))
        if len(self._leaving) == 1:
            self.flush()
        return True

    def flush(self) -> bool:
        """Send what waits, as far as it is taken; whether nothing waits any more. Raises ``OSError`` like ``send``."""
        while self._leaving:
            data = self._leaving[0]
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                return False
            except OSError as error:
                self._leaving.clear()
                self._broken = (error.errno or 0, error.strerror or str(error))
                with contextlib.suppress(OSError):  # not connected any more
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise
            if sent < len(data):
                self._leaving[0] = data[sent:]
                return False
            self._leaving.popleft()
        return True

    @property
    def waiting(self) -> int:
        """Messages that have not left, the last part of one included."""
        return len(self._leaving)

    @property
    def has_room(self) -> bool:
        """Whether one more message may wait."""
        return len(self._leaving) < self._limit

    @property
    def begun(self) -> int:
        """Bytes that are here of a message that is not whole."""
        return len(self._arrived)

    def receive(self) -> list[bytes]:
        """The whole messages that are here. A socket that fails is one that ends."""
        while not self.ended:
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                data = b""  # a reset, for one: it was closed with something of ours unread
            self._arrived += data
            self.ended = not data
            if len(data) < _READ:
                break
        return cut(self._arrived, _MOST)

    def close(self) -> None:
        """What waits is lost; what the kernel took still reaches the other end. Idempotent."""
        self._leaving.clear()
        self._socket.close()
