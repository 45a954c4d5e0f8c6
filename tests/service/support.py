"""Builders for the HTTP tests: a small application on a real port, and raw requests to it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from kvferry_service import auth
from kvferry_service.health import Readiness, add_health_routes
from kvferry_service.http_app import HttpServer, Translate, build_app, listen, read_body
from kvferry_service.metrics import add_metrics_route, make_registry
from kvferry_wire.limits import Limits

TOKEN = "t" * 32


def make_limits(**changes: Any) -> Limits:
    values: dict[str, Any] = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "body_bytes": 1000, "header_bytes": 1024}
    return Limits(**(values | changes))


class Notes:
    """What happened inside the handlers."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()


@asynccontextmanager
async def serving(
    limits: Limits | None = None, translate: Translate | None = None, close_s: float = 5.0
) -> AsyncIterator[tuple[int, Notes, web.Application]]:
    """Yields (port, notes, application)."""
    limits = limits or make_limits()
    notes = Notes()
    app = build_app(limits, auth.bearer({TOKEN: "router"}), translate=translate)
    add_health_routes(app, live=lambda: "", ready=Readiness(engine="loading").reason)
    add_metrics_route(app, make_registry())

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await read_body(request, limits))

    async def fail(_: web.Request) -> web.Response:
        raise KeyError("/secret/path")

    async def hang(_: web.Request) -> web.Response:
        notes.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            notes.cancelled.set()
            raise
        return web.Response()

    async def broken_stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"some bytes")
        raise RuntimeError("in the middle")

    app.router.add_post("/echo", echo)
    app.router.add_get("/fail", fail)
    app.router.add_get("/hang", hang)
    app.router.add_get("/broken", broken_stream)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(app, limits, internal=True, close_s=close_s)
    await server.start(listener)
    try:
        yield port, notes, app
    finally:
        await server.close()


async def raw(port: int, data: bytes) -> bytes:
    """Send bytes, return all that comes until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(5.0):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def request(method: str, path: str, *headers: str, body: bytes = b"", token: str = TOKEN) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *headers]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body)."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(first.split()[1]), headers, body


def error(answer: bytes) -> tuple[int, dict[str, Any]]:
    """(status, the error object), checking OpenAI's shape."""
    status, headers, body = parse(answer)
    assert headers["content-type"].startswith("application/json")
    shown: dict[str, Any] = json.loads(body)["error"]
    assert set(shown) == {"message", "type", "param", "code"}
    return status, shown
