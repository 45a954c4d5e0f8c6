"""The EngineCore's end of the local sockets, its inbox and what wakes it. For the loop's one thread, but ``post``."""

import os
import time
from collections import deque

import zmq

from kvferry_runtime.core.messages import Posted
from kvferry_runtime.engine import messages
from kvferry_runtime.engine.child import IDENTITY
from kvferry_runtime.engine.messages import Downward, EngineConfig, Upward

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

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", config: EngineConfig) -> None:
        self._down = context.socket(zmq.DEALER)
        self._down.setsockopt(zmq.IDENTITY, IDENTITY)
        self._up = context.socket(zmq.PUSH)
        for socket in (self._down, self._up):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, config.limits.engine_messages)
            socket.setsockopt(zmq.RCVHWM, config.limits.engine_messages)
        self._down.connect(config.down)
        self._up.connect(config.up)
        self._waker = Waker()
        self._posted: deque[Posted] = deque()
        self._poller = zmq.Poller()
        self._poller.register(self._down, zmq.POLLIN)
        self._poller.register(self._waker.read_fd, zmq.POLLIN)

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
            self._poller.poll(max(0, int(timeout_s * 1000)))
        self._waker.clear()

    def inbox(self) -> list[Downward | Posted]:
        """All that has arrived, without waiting."""
        found: list[Downward | Posted] = []
        while self._posted:
            found.append(self._posted.popleft())
        while True:
            try:
                found.append(messages.decode_down(self._down.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return found

    def send(self, message: Upward) -> None:
        """Send up. Raises ``ServerGoneError`` when the server has not made room for 10 s."""
        data = messages.encode(message)
        deadline = time.monotonic() + _BLOCKED_S
        while True:
            try:
                self._up.send(data, zmq.NOBLOCK)
                return
            except zmq.Again:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ServerGoneError(f"the API server has taken nothing for {_BLOCKED_S:.0f} s") from None
                self._up.poll(int(left * 1000), zmq.POLLOUT)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the sockets; what was sent up last gets so many seconds to leave."""
        self._down.close(0)
        self._up.close(int(linger_s * 1000))
        self._waker.close()
