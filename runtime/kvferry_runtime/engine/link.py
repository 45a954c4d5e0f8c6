"""The EngineCore's end of the socket to its server, its inbox, and what wakes it. One thread's, but for ``post``."""

import os
import select
import socket
import time
from collections import deque

from kvferry_runtime.core.messages import Posted
from kvferry_runtime.engine import messages
from kvferry_runtime.engine.message_socket import MessageSocket
from kvferry_runtime.engine.messages import Downward, Stop, Upward
from kvferry_wire.limits import Limits

_BLOCKED_S = 10.0


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
    """Messages down from the server and in from the transfer threads; messages up to the server."""

    def __init__(self, end: socket.socket, limits: Limits) -> None:
        self._server = MessageSocket(end, limits.engine_messages)
        self._waker = Waker()
        self._posted: deque[Posted] = deque()
        self._poller = select.poll()
        self._poller.register(self._server, select.POLLIN)
        self._poller.register(self._waker.read_fd, select.POLLIN)

    def post(self, event: Posted) -> None:
        """From the transfer's threads: put an event into the inbox and wake the loop."""
        self._posted.append(event)
        self._waker.wake()

    def wake(self) -> None:
        """From any thread: end the loop's wait."""
        self._waker.wake()

    def wait(self, timeout_s: float) -> None:
        """Return when something is in the inbox, someone woke the loop, what waits can leave, or the time is up."""
        if not self._posted:
            leaving = select.POLLOUT if self._server.waiting else 0
            self._poller.modify(self._server, select.POLLIN | leaving)
            self._poller.poll(max(0, int(timeout_s * 1000)))
        self._waker.clear()

    def inbox(self) -> list[Downward | Posted]:
        """All that has arrived, without waiting. A server that is gone is one that says ``Stop``."""
        self._flush()
        found: list[Downward | Posted] = []
        while self._posted:
            found.append(self._posted.popleft())
        found += map(messages.decode_down, self._server.receive())
        if self._server.ended:
            found.append(Stop())
        return found

    def send(self, message: Upward) -> None:
        """Send up. Raises ``ServerGoneError`` when the server is gone, or has not made room for 10 s."""
        data = messages.encode(message)
        deadline = time.monotonic() + _BLOCKED_S
        try:
            while not self._server.send(data):
                if not self._left_by(deadline):
                    raise ServerGoneError(f"the API server has taken nothing for {_BLOCKED_S:.0f} s")
        except OSError as error:
            raise ServerGoneError(f"the API server is gone: {error.strerror}") from None

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; what was sent up last gets so many seconds to leave."""
        deadline = time.monotonic() + linger_s
        try:
            while self._server.waiting and self._left_by(deadline):
                pass
        except OSError:
            pass  # nobody is there to take it
        self._server.close()
        self._waker.close()

    def _flush(self) -> None:
        try:
            self._server.flush()
        except OSError:
            pass  # the server is gone, as `receive` tells

    def _left_by(self, deadline: float) -> bool:
        """Wait until some of what waits has left, at most until ``deadline``. Raises ``OSError``."""
        poller = select.poll()
        poller.register(self._server, select.POLLOUT)
        before = self._server.waiting
        while time.monotonic() < deadline:
            poller.poll(max(1, int((deadline - time.monotonic()) * 1000)))
            self._server.flush()
            if self._server.waiting < before:
                return True
        return False
