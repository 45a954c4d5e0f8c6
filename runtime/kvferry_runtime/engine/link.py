"""The EngineCore's end of the socket to its server, its inbox, and what wakes it.

For the loop's one thread, but for ``post`` and ``wake``.
"""

import math
import os
import select
import socket
import threading
import time
from collections import deque

from kvferry_runtime.core.messages import Posted
from kvferry_runtime.engine import messages
from kvferry_runtime.engine.message_socket import MessageSocket
from kvferry_runtime.engine.messages import Downward, Stop, Upward
from kvferry_wire.limits import Limits

_BLOCKED_S = 10.0
_REST_MS = 5  # for more of a message that has begun to arrive
_INBOX_S = 0.02  # for all that arrives meanwhile
_ROOM_MS = 100  # between two looks at whether the link closes


class ServerGoneError(RuntimeError):
    """The API server takes no outputs any more."""


class Waker:
    """Lets other threads end the loop's wait: a descriptor that a poll can watch."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """From any thread. A full pipe wakes as well as one more byte would."""
        try:
            os.write(self._write_fd, b"\0")
        except OSError:
            pass  # full: the loop wakes anyway; closed: there is no loop to wake

    def clear(self) -> None:
        try:
            while len(os.read(self.read_fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass  # the last read took the last byte

    def close(self) -> None:
        os.close(self._write_fd)
        os.close(self.read_fd)


class Link:
    """Messages down from the server and in from the transfer threads; messages up to the server.

    A message up that the kernel takes leaves on the caller's thread. What it does not take at once, a large snapshot
    for one, leaves by a thread that is there for nothing else, so that it does not wait for the steps in between.
    """

    def __init__(self, end: socket.socket, limits: Limits) -> None:
        self._server = MessageSocket(end, limits.engine_messages)
        self._waker = Waker()
        self._posted: deque[Posted] = deque()
        self._poller = select.poll()
        self._poller.register(self._server, select.POLLIN)
        self._poller.register(self._waker.read_fd, select.POLLIN)
        self._rest = select.poll()
        self._rest.register(self._server, select.POLLIN)
        self._sending = threading.Condition()  # guards sending on `_server`, and `_closes_at`
        self._closes_at = math.inf
        self._sender = threading.Thread(target=self._send_late, name="engine-sender", daemon=True)
        self._sender.start()

    def post(self, event: Posted) -> None:
        """From the transfer's threads: put an event into the inbox and wake the loop."""
        self._posted.append(event)
        self._waker.wake()

    def wake(self) -> None:
        """From any thread: end the loop's wait."""
        self._waker.wake()

    def wait(self, timeout_s: float) -> None:
        """Return when something is in the inbox, someone woke the loop, or the time is up."""
        if not self._posted:
            self._poller.poll(max(0, math.ceil(timeout_s * 1000)))
        self._waker.clear()

    def inbox(self) -> list[Downward | Posted]:
        """All that has arrived; the rest of a large message is waited for while it comes.

        A server that is gone is one that says ``Stop``.
        """
        until = time.monotonic() + _INBOX_S
        begun = self._server.begun
        arrived = self._server.receive()
        while self._server.begun not in (0, begun) and time.monotonic() < until and self._rest.poll(_REST_MS):
            begun = self._server.begun
            arrived += self._server.receive()
        found: list[Downward | Posted] = []
        while self._posted:
            found.append(self._posted.popleft())
        found += map(messages.decode_down, arrived)
        if self._server.ended:
            found.append(Stop())
        return found

    def send(self, message: Upward) -> None:
        """Send up. Raises ``ServerGoneError`` when the server is gone, or has not made room for 10 s."""
        data = messages.encode(message)
        with self._sending:
            try:
                while not self._server.send(data):
                    if not self._sending.wait_for(lambda: self._server.has_room, _BLOCKED_S):
                        raise ServerGoneError(f"the API server has taken nothing for {_BLOCKED_S:.0f} s")
            except OSError as error:
                raise ServerGoneError(f"the API server is gone: {error.strerror}") from None
            if self._server.waiting:
                self._sending.notify_all()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; what was sent up last gets so many seconds to leave."""
        with self._sending:
            self._closes_at = time.monotonic() + linger_s
            self._sending.notify_all()
        self._sender.join()
        self._server.close()
        self._waker.close()

    def _send_late(self) -> None:
        poller = select.poll()
        poller.register(self._server, select.POLLOUT)
        while True:
            with self._sending:
                self._sending.wait_for(lambda: self._server.waiting or self._closes_at < math.inf)
                if not self._server.waiting or time.monotonic() >= self._closes_at:
                    return
            poller.poll(_ROOM_MS)
            with self._sending:
                try:
                    self._server.flush()
                except OSError:
                    pass  # the server is gone: whoever sends next is told
                self._sending.notify_all()
