"""A wire between a prefill pod and those that read its KV: a process that passes connections on, and spoils them.

``python -m tests.chaos.wire LISTEN TARGET CONTROL_PORT DATA_PORT``: both ports lead to the target's. Standard input is
its remote control, a line of JSON for each fault that begins or ends (``Spoil``), and its end is the wire's end. For
each connection that was spoilt after KV had begun to pass a ``Hit`` is printed.
"""

import asyncio
import contextlib
import sys
from typing import Literal

import msgspec

CHUNK = 64 * 1024
CONNECT_S = 5.0
HANDSHAKE_BYTES = 4096  # what more an owner sends is KV


class Spoil(msgspec.Struct, frozen=True, kw_only=True):
    """What the wire does to the data plane from now on, in the direction of the reader."""

    how: Literal["nothing", "reset", "hold", "flip"]
    after: int = 0  # bytes of KV that pass before
    fault: int = -1  # its number, for what is printed


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer under way was spoilt."""

    fault: int
    at: float  # time.monotonic


class Wire:
    """The one wire of this process."""

    def __init__(self, listen: str, target: str) -> None:
        self._listen, self._target = listen, target
        self._spoil = Spoil(how="nothing")
        self._changed = asyncio.Event()
        self._hit: set[tuple[int, int]] = set()  # fault, connection
        self._connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, control_port: int, data_port: int) -> None:
        """Until the end of standard input."""
        await asyncio.start_server(lambda r, w: self._accept(r, w, control_port, False), self._listen, control_port)
        await asyncio.start_server(lambda r, w: self._accept(r, w, data_port, True), self._listen, data_port)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print("listening", flush=True)
        while line := await reader.readline():
            self._spoil = msgspec.json.decode(line, type=Spoil)
            self._changed.set()
            self._changed = asyncio.Event()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, data: bool) -> None:
        self._connections += 1
        number = self._connections
        try:
            async with asyncio.timeout(CONNECT_S):
                owner_reader, owner_writer = await asyncio.open_connection(self._target, port)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        ways = [self._pass(reader, owner_writer), self._pass(owner_reader, writer, number if data else 0)]
        tasks = [asyncio.create_task(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in (writer, owner_writer):  # half-closed connections are in neither protocol
            if self._spoil.how == "reset":
                end.transport.abort()
            else:
                end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int = 0) -> None:
        """Bytes of one direction, until it ends or is spoilt to its end. ``number``: of a data connection."""
        passed = 0
        with contextlib.suppress(OSError):  # either side has gone
            while data := await reader.read(CHUNK):
                begun, spoil = passed, self._spoil
                passed += len(data)
                if number and spoil.how != "nothing" and passed > HANDSHAKE_BYTES:
                    if spoil.how == "hold":
                        await self._hold(data, writer, number)
                        continue
                    at = max(HANDSHAKE_BYTES, spoil.after) - begun
                    if at < len(data) and self._tell(spoil, number):
                        if spoil.how == "reset":
                            writer.write(data[: max(0, at)])
                            return
                        data = _flipped(data, max(0, at))
                writer.write(data)
                await writer.drain()

    async def _hold(self, data: bytes, writer: asyncio.StreamWriter, number: int) -> None:
        """Keep the last byte back until something else is told."""
        self._tell(self._spoil, number)
        writer.write(data[:-1])
        while self._spoil.how == "hold":
            await self._changed.wait()
        writer.write(data[-1:])
        await writer.drain()

    def _tell(self, spoil: Spoil, number: int) -> bool:
        """Whether this fault has not hit this connection before; then it has now."""
        if (spoil.fault, number) in self._hit:
            return False
        self._hit.add((spoil.fault, number))
        hit = Hit(fault=spoil.fault, at=asyncio.get_running_loop().time())
        print(msgspec.json.encode(hit).decode(), flush=True)
        return True


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


if __name__ == "__main__":
    asyncio.run(Wire(*sys.argv[1:3]).run(*map(int, sys.argv[3:5])))
