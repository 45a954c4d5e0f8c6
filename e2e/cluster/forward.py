#!/usr/bin/env python3
"""Carry connections to a port of this machine's loopback on to the same port inside a network namespace.

    forward.py NETNS PORT      until SIGTERM; NETNS is a path such as /run/netns/NAME

Clusters on the private Docker live in a network namespace. With this, kubectl and its port-forwards work outside, and
nothing of the machine's network is changed: this is an ordinary process that listens on 127.0.0.1.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys

CONNECT_TIMEOUT_S = 5.0
CHUNK = 2**16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


async def _carry(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        opened = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError):
        writer.close()  # as refused as the one inside
        return
    inner_reader, inner_writer = opened
    try:
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
    finally:
        for each in (inner_writer, writer):
            each.close()


async def _serve(listener: socket.socket, port: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await asyncio.start_server(lambda reader, writer: _carry(port, reader, writer), sock=listener)
    await stop.wait()
    server.close()


def main(arguments: list[str]) -> None:
    """Bind outside, then become the same program inside: a socket stays where it was made."""
    if len(arguments) == 3 and arguments[0] == "--bound":
        asyncio.run(_serve(socket.socket(fileno=int(arguments[1])), int(arguments[2])))
        return
    if len(arguments) != 2:
        sys.exit("usage: forward.py NETNS PORT")
    namespace, port = arguments
    listener = socket.create_server(("127.0.0.1", int(port)))
    os.set_inheritable(listener.fileno(), True)
    inside = [sys.executable, os.path.realpath(__file__), "--bound", str(listener.fileno()), port]
    os.execvp("nsenter", ["nsenter", f"--net={namespace}", *inside])


if __name__ == "__main__":
    main(sys.argv[1:])
