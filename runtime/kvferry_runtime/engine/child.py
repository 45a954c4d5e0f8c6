"""One EngineCore process and the two local sockets to it, for one life of the process."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvferry_runtime.engine import messages
from kvferry_runtime.engine.messages import Downward, EngineConfig, Upward
from kvferry_service import logs
from kvferry_service.parent import Child, own_module, spawn
from kvferry_wire.limits import Limits

IDENTITY = b"engine"  # of the EngineCore's DEALER
_ROUTE_S = 10.0

_log = logs.get_logger(__name__)


class EngineGoneError(Exception):
    """The EngineCore cannot take a message: it is not there, or its queue is full."""


class EngineChild:
    """Starts at construction; ``close`` ends the process, hard if need be, and both sockets."""

    def __init__(self, context: zmq.asyncio.Context, config: EngineConfig) -> None:
        self._limits: Limits = config.limits
        self._folder: Path | None = Path(tempfile.mkdtemp(prefix="kvferry-"))  # mode 0700: no other user gets in
        self._down: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.ROUTER)
        self._up = context.socket(zmq.PULL)
        try:
            self._down.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._down.setsockopt(zmq.SNDHWM, self._limits.engine_messages)
            self._up.setsockopt(zmq.RCVHWM, self._limits.engine_messages)
            config = msgspec.structs.replace(config, down=f"ipc://{self._folder}/down", up=f"ipc://{self._folder}/up")
            self._down.bind(config.down)
            self._up.bind(config.up)
            self._child = self._spawn(config)
        except BaseException:
            self._close_sockets()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_status(self) -> int | None:
        """The process's status when it has ended; negative for a signal."""
        return self._child.process.poll()

    def send(self, message: Downward) -> None:
        """Hand a message over. Raises ``EngineGoneError``."""
        try:
            self._down.send_multipart([IDENTITY, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineGoneError(f"the engine takes no message: {error.strerror}") from None

    async def connected(self) -> None:
        """Wait until messages can be sent, then leave no name behind. Call after the first message came up."""
        deadline = asyncio.get_running_loop().time() + _ROUTE_S
        while True:
            try:
                self.send(messages.SnapshotRequest(number=0))
                break
            except EngineGoneError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.01)
        self._unlink()

    async def receive(self) -> Upward:
        """The next message up; waits for ever (the watchdog judges silence)."""
        return messages.decode_up(await self._up.recv())

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
        self._close_sockets()

    def _spawn(self, config: EngineConfig) -> Child:
        env = dict(os.environ)
        env["OMP_NUM_THREADS"] = str(config.threads)
        child = spawn(
            own_module("kvferry_runtime.engine.process"),
            env=env,
            stdin=subprocess.PIPE,
        )
        stdin = child.process.stdin
        assert stdin is not None
        try:
            stdin.write(messages.encode(config))  # at most a few KiB: a pipe takes it without a reader
            stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; its exit status says so
        return child

    def _close_sockets(self) -> None:
        self._down.close(0)
        self._up.close(0)
        self._unlink()

    def _unlink(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def socket_folder(config: EngineConfig) -> Path:
    """Where the two sockets of an engine's configuration have their names, as long as they have any."""
    return Path(config.down.removeprefix("ipc://")).parent


def _ended(process: "subprocess.Popen[bytes]", within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True
