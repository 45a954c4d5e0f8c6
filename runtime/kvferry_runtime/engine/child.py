"""One EngineCore process and the socket to it, for one life of the process."""

import asyncio
import os
import socket
import subprocess

from kvferry_runtime.engine import messages
from kvferry_runtime.engine.message_socket import MessageSocket
from kvferry_runtime.engine.messages import Downward, EngineConfig, Upward
from kvferry_service import logs
from kvferry_service.parent import Child, own_module, spawn
from kvferry_wire.limits import Limits

_log = logs.get_logger(__name__)


class EngineGoneError(Exception):
    """The EngineCore cannot take a message: it is not there, or its queue is full."""


class EngineChild:
    """Starts at construction, in a running event loop; ``close`` ends the process, hard if need be, and the socket."""

    def __init__(self, config: EngineConfig) -> None:
        self._limits: Limits = config.limits
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self._socket = MessageSocket(ours, self._limits.engine_messages)
        # Not bounded but by the socket: the reader takes all that is here before the loop reads it again.
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        try:
            self._loop.add_reader(ours.fileno(), self._readable)
            self._child = _spawn(config, theirs.fileno())
        except BaseException:
            self._close_socket()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_status(self) -> int | None:
        """The process's status when it has ended; negative for a signal."""
        return self._child.process.poll()

    def send(self, message: Downward) -> None:
        """Hand a message over. Raises ``EngineGoneError``."""
        try:
            if not self._socket.send(messages.encode(message)):
                raise EngineGoneError(f"the engine takes no message: {self._limits.engine_messages} wait")
        except OSError as error:
            raise EngineGoneError(f"the engine takes no message: {error.strerror}") from None
        if self._socket.waiting:
            self._loop.add_writer(self._socket.fileno(), self._writable)

    async def receive(self) -> Upward:
        """The next message up; waits for ever (the watchdog judges silence, and the process's end)."""
        return messages.decode_up(await self._arrived.get())

    def kill(self) -> None:
        """SIGKILL: also ends a stopped process."""
        if self._child.process.poll() is None:
            self._child.process.kill()

    async def close(self) -> None:
        """End the process: asked first, killed when it takes longer than ``engine_stop_s``."""
        process = self._child.process
        if process.poll() is None:
            try:
                self.send(messages.Stop())
            except EngineGoneError:
                process.terminate()
        if not await asyncio.to_thread(_ended, process, self._limits.engine_stop_s):
            _log.warning("the engine does not end, killing it", extra=logs.fields(pid=process.pid))
            process.kill()
            await asyncio.to_thread(process.wait)
        self._child.let_go()
        self._close_socket()

    def _readable(self) -> None:
        for message in self._socket.receive():
            self._arrived.put_nowait(message)
        if self._socket.ended:
            self._loop.remove_reader(self._socket.fileno())

    def _writable(self) -> None:
        try:
            done = self._socket.flush()
        except OSError:
            done = True  # nothing leaves any more: the engine sees the end of its socket, and the watchdog that of it
        if done:
            self._loop.remove_writer(self._socket.fileno())

    def _close_socket(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()


def _spawn(config: EngineConfig, fd: int) -> Child:
    env = dict(os.environ)
    env["OMP_NUM_THREADS"] = str(config.threads)
    argv = [*own_module("kvferry_runtime.engine.process"), "--link-fd", str(fd)]
    child = spawn(argv, env=env, stdin=subprocess.PIPE, pass_fds=(fd,))
    stdin = child.process.stdin
    assert stdin is not None
    try:
        stdin.write(messages.encode(config))  # at most a few KiB: a pipe takes it without a reader
        stdin.close()
    except BrokenPipeError:
        pass  # it has ended already; its exit status says so
    return child


def _ended(process: "subprocess.Popen[bytes]", within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True
