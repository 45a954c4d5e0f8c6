"""An API server that misbehaves: a proxy before the real one, with a rule that may be changed at any time.

It runs in a thread with its own event loop. A rule sees each request and says what becomes of it; what it lets through
is passed on as it is.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.apiserver.operator.install import Installation

CLOSE_S = 0.5  # connections with TLS end some turns of the loop after they were closed
Rule = Callable[["Asked"], "Fault | None"]


class Asked:
    """A request as a rule sees it."""

    def __init__(self, request: web.Request, number: int) -> None:
        self.method = request.method
        self.path = request.path
        self.watch = request.query.get("watch") == "true"
        self.list = request.method == "GET" and not self.watch and "limit" in request.query
        self.number = number  # of all requests, from 1
        self.change = request.method in ("POST", "PUT", "PATCH", "DELETE")
        self.lease = "/leases/" in self.path or self.path.endswith("/leases")


class Fault:
    """What becomes of a request.

    Args:
        status: answered with this by the proxy itself.
        cut: the connection is closed without an answer; with ``done`` after the server has done it.
        hang_s: the server has done it, and the answer comes so much later.
        watch_s: a watch is closed after so long.
        silent: a watch hears nothing.
        event: a watch hears this, and is closed.
    """

    def __init__(
        self,
        status: int = 0,
        *,
        retry_after: int | None = None,
        cut: bool = False,
        done: bool = False,
        hang_s: float = 0.0,
        watch_s: float | None = None,
        silent: bool = False,
        event: dict[str, Any] | None = None,
    ) -> None:
        self.status = status
        self.retry_after = retry_after
        self.cut = cut
        self.done = done
        self.hang_s = hang_s
        self.watch_s = watch_s
        self.silent = silent
        self.event = event


class FaultyServer:
    """The proxy. ``seen`` counts requests; those for the Lease apart."""

    def __init__(self, installation: Installation) -> None:
        self.rule: Rule = lambda asked: None
        self.seen: Counter[str] = Counter()
        self.mute = False  # what open watches hear is lost
        self._watches: set[aiohttp.ClientResponse] = set()
        self._upstream = installation.server.url
        self._number = 0
        self._loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._ended: asyncio.Event
        self.port = 0
        self._thread = threading.Thread(target=self._main, name="faulty server")
        self._thread.start()
        self._ready.wait(10)
        config = json.loads(installation.kubeconfig.read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self.port}"}
        self.kubeconfig = installation.folder / f"faulty-{self.port}.kubeconfig"
        self.kubeconfig.write_text(json.dumps(config))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(20)
        Path(self.kubeconfig).unlink()

    def hang_up(self) -> None:
        """End all watches that are open."""
        self._loop.call_soon_threadsafe(lambda: [watch.close() for watch in tuple(self._watches)])

    # ---- in its thread

    def _main(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(ssl=False, limit=0)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, connector_owner=False, auto_decompress=False
        ) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._answer(request, session)

            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{rest:.*}", handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._ready.set()
            await self._ended.wait()
            await runner.cleanup()
        await connector.close(abort_ssl=True)
        await asyncio.sleep(CLOSE_S)

    async def _answer(self, request: web.Request, session: aiohttp.ClientSession) -> web.StreamResponse:
        self._number += 1
        asked = Asked(request, self._number)
        kind = "lease" if asked.lease else "watch" if asked.watch else "list" if asked.list else "call"
        self.seen[kind] += 1
        fault = self.rule(asked) or Fault()
        if fault.status:
            return self._refusal(fault)
        if fault.cut and not fault.done:
            return cut(request)
        if asked.watch and fault.event is not None:
            return await self._one_event(request, fault.event)
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        url = self._upstream + request.path_qs
        body = await request.read() or None
        async with session.request(request.method, url, headers=headers, data=body) as answer:
            if fault.cut:
                await answer.read()
                return cut(request)
            await asyncio.sleep(fault.hang_s)
            made = web.StreamResponse(status=answer.status)
            made.content_type = answer.content_type
            if asked.watch:
                self._watches.add(answer)
            try:
                await made.prepare(request)
                await self._pass_on(made, answer, fault, watch=asked.watch)
            except (ConnectionError, aiohttp.ClientError):
                pass  # who asked has gone, or was hung up on
            finally:
                self._watches.discard(answer)
            return made

    async def _pass_on(
        self, made: web.StreamResponse, answer: aiohttp.ClientResponse, fault: Fault, *, watch: bool
    ) -> None:
        send: Callable[[bytes], Awaitable[None]] = made.write
        try:
            async with asyncio.timeout(fault.watch_s):
                async for part in answer.content.iter_any():
                    if not (watch and (fault.silent or self.mute)):
                        await send(part)
        except TimeoutError:
            pass  # the watch was open long enough

    async def _one_event(self, request: web.Request, event: dict[str, Any]) -> web.StreamResponse:
        made = web.StreamResponse()
        made.content_type = "application/json"
        await made.prepare(request)
        await made.write(json.dumps(event).encode() + b"\n")
        return made

    def _refusal(self, fault: Fault) -> web.Response:
        headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
        body = {"kind": "Status", "code": fault.status, "message": "the proxy says no", "reason": "Fault"}
        return web.json_response(body, status=fault.status, headers=headers)


def cut(request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
