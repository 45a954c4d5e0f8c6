"""An API server for EndpointSlices over real HTTP: lists, watches with versions and bookmarks, and faults on demand."""

import asyncio
import json
import ssl
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from kvferry_router.discovery.api_server import Access
from kvferry_router.discovery.slices import SERVICE_LABEL

from .objects import NAMESPACE, Object

TOKEN = "first-token"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


class FakeApi:
    """Speaks the contract; ``access`` is how to reach it."""

    def __init__(self, folder: Path) -> None:
        self.objects: dict[str, Object] = {}
        self.version = 100
        self.events: list[tuple[int, str, Object]] = []
        self.tokens = {TOKEN}
        self.calls: list[tuple[float, str, str]] = []  # time, list or watch, status or why it ended
        self.asked: list[dict[str, str]] = []
        self.answers: deque[int | bytes] = deque()  # for the next calls: a status, or a body that is none
        self.retry_after = ""
        self.forgotten = 0  # versions up to this one are answered with 410
        self.gone_in_stream = False  # by an event of the watch, and not by the status
        self.watch_s = 600.0  # after which a watch is closed, whatever the client asked for
        self.bookmark_s = 0.2
        self.mute = False  # watches say nothing
        self.slow_s = 0.0  # before an answer begins
        self.watches = 0
        self._changed = asyncio.Event()
        self._folder = folder
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._scheme = "http"
        (folder / "token").write_text(TOKEN)
        if not (folder / "ca.crt").exists():
            (folder / "ca.crt").write_text("")

    # ---- running -----------------------------------------------------------------------------------------------

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen, on the same port as before."""
        app = web.Application()
        app.router.add_get(PATH, self._get)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=tls, reuse_address=True)
        await site.start()
        assert site._server is not None
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self._scheme = "http" if tls is None else "https"

    async def stop(self) -> None:
        """Gone, with every connection cut."""
        if self._runner is not None:
            for connection in list(self._runner.server.connections if self._runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    @property
    def access(self) -> Access:
        return Access(f"{self._scheme}://127.0.0.1:{self._port}", self._folder / "token", self._folder / "ca.crt")

    def rotate(self, token: str, *, write: bool = True) -> None:
        """Only this token is good from now on; ``write``: the kubelet has brought it to the pod."""
        self.tokens = {token}
        if write:
            draft = self._folder / ".token"
            draft.write_text(token)
            draft.replace(self._folder / "token")

    # ---- what is there -----------------------------------------------------------------------------------------

    def put(self, made: Object) -> None:
        """Add or change a slice."""
        name = made["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        self.objects[name] = made
        self._note(kind, made)

    def delete(self, name: str) -> None:
        self.version += 1
        gone = self.objects.pop(name)
        self._note("DELETED", gone | {"metadata": gone["metadata"] | {"resourceVersion": str(self.version)}})

    def send(self, kind: str, made: Any) -> None:
        """An event that changes nothing here."""
        self.version += 1
        self._note(kind, made)

    def forget(self, *, in_stream: bool = False) -> None:
        """Compact: no watch can begin before now."""
        self.version += 1
        self.forgotten, self.gone_in_stream = self.version - 1, in_stream

    def _note(self, kind: str, made: Object) -> None:
        self.events.append((self.version, kind, made))
        self._changed.set()
        self._changed = asyncio.Event()

    def of(self, kind: str) -> list[tuple[float, str]]:
        """The calls of a kind: when, and what came of it."""
        return [(at, told) for at, what, told in self.calls if what == kind]

    # ---- answers -----------------------------------------------------------------------------------------------

    async def _get(self, request: web.Request) -> web.StreamResponse:
        kind = "watch" if request.query.get("watch") else "list"
        self.asked.append(dict(request.query))
        now = asyncio.get_running_loop().time()
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        if request.headers.get("Authorization") not in {f"Bearer {token}" for token in self.tokens}:
            self.calls.append((now, kind, "401"))
            return self._status(401, "Unauthorized")
        if self.answers:
            answer = self.answers.popleft()
            self.calls.append((now, kind, str(answer)[:20]))
            return web.Response(body=answer) if isinstance(answer, bytes) else self._status(answer, "scripted")
        if kind == "list":
            self.calls.append((now, kind, "200"))
            found = [made for made in self.objects.values() if self._chosen(made, request)]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": found})
        since = int(request.query["resourceVersion"])
        if since <= self.forgotten and not self.gone_in_stream:
            self.calls.append((now, kind, "410"))
            return self._status(410, "too old resource version")
        self.calls.append((now, kind, "200"))
        return await self._watch(request, since)

    async def _watch(self, request: web.Request, since: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.watches += 1
        until = asyncio.get_running_loop().time() + min(self.watch_s, float(request.query["timeoutSeconds"]))
        try:
            if since <= self.forgotten:
                await self._write(response, "ERROR", {"kind": "Status", "code": 410, "message": "too old"})
                return response
            while (left := until - asyncio.get_running_loop().time()) > 0:
                changed = self._changed
                for version, kind, made in self.events if not self.mute else ():
                    if version > since and (
                        kind not in ("ADDED", "MODIFIED", "DELETED") or self._chosen(made, request)
                    ):
                        await self._write(response, kind, made)
                        since = version
                with suppress(TimeoutError):  # nothing changed: time for a bookmark
                    async with asyncio.timeout(min(left, self.bookmark_s)):
                        await changed.wait()
                    continue
                if not self.mute and not changed.is_set():  # all up to here has been written
                    await self._write(response, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})
            await response.write_eof()
        finally:
            self.watches -= 1
        return response

    async def _write(self, response: web.StreamResponse, kind: str, made: Any) -> None:
        await response.write(json.dumps({"type": kind, "object": made}).encode() + b"\n")

    def _chosen(self, made: Object, request: web.Request) -> bool:
        chosen = request.query["labelSelector"].removeprefix(f"{SERVICE_LABEL} in (").removesuffix(")").split(",")
        return made["metadata"]["labels"][SERVICE_LABEL] in chosen

    def _status(self, code: int, message: str) -> web.Response:
        headers = {"Retry-After": self.retry_after} if self.retry_after else {}
        body = {"kind": "Status", "status": "Failure", "message": message, "code": code}
        return web.json_response(body, status=code, headers=headers)
