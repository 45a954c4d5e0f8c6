"""HTTP servers for fetch tests: files with every fault that a transfer meets, in a thread of their own."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web


@dataclass
class Seen:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class FileServer:
    """Serves ``files`` by path. The other fields are its faults; all may be changed between requests."""

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)  # path -> bytes after which each next answer breaks off
    stalls: set[str] = field(default_factory=set)  # paths whose next answer stops in its middle and stays open
    statuses: dict[str, list[int]] = field(default_factory=dict)  # path -> statuses of the next answers
    redirects: dict[str, str] = field(default_factory=dict)
    token: str | None = None  # asked for
    ranges: bool = True
    head: bool = True
    validators: bool = True
    chunked: set[str] = field(default_factory=set)  # paths without a Content-Length
    headers: dict[str, dict[str, str]] = field(default_factory=dict)  # path -> more headers
    damage: set[str] = field(default_factory=set)  # paths of which one byte is another than the validator says
    seen: list[Seen] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # path -> body bytes sent
    url: str = ""

    def asked(self, path: str, method: str = "GET") -> list[Seen]:
        """Requests for a path."""
        return [one for one in self.seen if (one.method, one.path) == (method, path)]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.seen.append(Seen(request.method, request.raw_path, dict(request.headers)))
        if self.statuses.get(path):
            return web.Response(status=self.statuses[path].pop(0), headers=self.headers.get(path))
        if path in self.redirects:
            return web.Response(status=302, headers={"Location": self.redirects[path]})
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        if request.method == "HEAD" and not self.head:
            return web.Response(status=405)
        if path not in self.files:
            return web.Response(status=404)
        return await self._file(request, path)

    async def _file(self, request: web.Request, path: str) -> web.StreamResponse:
        content = self.files[path]
        etag = '"' + hashlib.sha256(content).hexdigest()[:12] + '"'
        if path in self.damage:
            content = bytes([content[0] ^ 1]) + content[1:]
        start, status = self._start(request, content, etag)
        response = web.StreamResponse(status=status, headers=self.headers.get(path))
        if self.validators:
            response.headers["ETag"] = etag
        body = content[start:]
        if status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if path in self.chunked:
            response.enable_chunked_encoding()
        else:
            response.content_length = len(body)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        await self._send(request, response, path, body)
        return response

    def _start(self, request: web.Request, content: bytes, etag: str) -> tuple[int, int]:
        given = request.headers.get("Range")
        if not self.ranges or given is None or request.headers.get("If-Range", etag) != etag:
            return 0, 200
        return int(given.removeprefix("bytes=").partition("-")[0]), 206

    async def _send(self, request: web.Request, response: web.StreamResponse, path: str, body: bytes) -> None:
        cut = self.cuts[path].pop(0) if self.cuts.get(path) else None
        part = body if cut is None else body[:cut]
        if path in self.stalls:
            part = body[: len(body) // 2]
        for at in range(0, len(part), 65536):
            await response.write(part[at : at + 65536])
        self.sent[path] = self.sent.get(path, 0) + len(part)
        if path in self.stalls:
            self.stalls.discard(path)
            await asyncio.sleep(30)
        if cut is not None:
            assert request.transport is not None
            request.transport.close()


def serve_folder(server: FileServer, folder: Path, at: str = "/m/") -> str:
    """Put a model's folder onto a server; its address."""
    for file in folder.iterdir():
        server.files[at + file.name] = file.read_bytes()
    return server.url + at


@contextmanager
def running(handle: Callable[[web.Request], object], on_start: Callable[[str], None]) -> Iterator[None]:
    """Run a handler of all requests on a free port of 127.0.0.1."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    runners: list[web.AppRunner] = []

    async def start() -> None:
        app = web.Application(client_max_size=2**20)
        app.router.add_route("*", "/{path:.*}", handle)  # type: ignore[arg-type]
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        host, port = runner.addresses[0][:2]
        on_start(f"http://{host}:{port}")
        started.set()

    async def end() -> None:
        await runners[0].cleanup()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, name="file-server", daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def file_server() -> Iterator[FileServer]:
    """A file server without files."""
    server = FileServer()

    def started(url: str) -> None:
        server.url = url

    with running(server.handle, started):
        yield server
