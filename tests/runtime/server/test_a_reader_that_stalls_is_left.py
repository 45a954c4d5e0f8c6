"""A reader that takes nothing holds its leg no longer than the stall limit."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from kvferry_runtime.server.writing import write, write_end
from kvferry_service import auth
from kvferry_service.http_app import HttpServer, build_app, listen
from kvferry_wire.limits import Limits


@pytest.mark.parametrize("size", [1000, 64 * 2**20])
async def test_a_stalled_write_ends_its_handler_and_cuts_the_connection(size: int) -> None:
    """Many small writes and a single large one alike."""
    limits = Limits(client_stall_s=0.3)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await write(response, bytes(size), limits)
        except ConnectionResetError as error:
            ended.set_result(str(error))
            raise

    app = build_app(limits, auth.anyone)
    app.router.add_get("/", endless)
    listener = listen("127.0.0.1", 0)
    server = HttpServer(app, limits, internal=False, close_s=0.5)
    await server.start(listener)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1], limit=1000)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(5):
            assert "taken nothing for 0.3 s" in await ended
            tail = b""
            try:
                while piece := await reader.read(2**20):
                    tail = (tail + piece)[-16:]
            except ConnectionResetError:
                pass  # as good an end
        writer.close()
        assert not tail.endswith(b"\r\n0\r\n\r\n")
    finally:
        await server.close()


async def test_a_slow_reader_gets_all() -> None:
    """The limit is of each piece: an answer may take longer than that as a whole."""
    limits = Limits(client_stall_s=0.5)
    body = bytes(range(256)) * 2**16

    async def whole(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await write(response, body, limits)
        await write_end(response, limits)
        return response

    app = build_app(limits, auth.anyone)
    app.router.add_get("/", whole)
    listener = listen("127.0.0.1", 0)
    server = HttpServer(app, limits, internal=False)
    await server.start(listener)
    try:
        got = b""
        async with (
            aiohttp.ClientSession(read_bufsize=2**16) as client,
            client.get(f"http://127.0.0.1:{listener.getsockname()[1]}/") as response,
        ):
            while piece := await response.content.read(2**20):
                got += piece
                await asyncio.sleep(0.05)
        assert got == body
    finally:
        await server.close()
