"""``/internal/v1``: what the router asks of a pod. Present only when the pod has keys."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from aiohttp import web

from kvferry_runtime.engine.child import EngineGoneError
from kvferry_runtime.engine.messages import Ready
from kvferry_runtime.server.legs import FrameGroup, Legs
from kvferry_runtime.server.pod import Pod
from kvferry_runtime.server.writing import write, write_end
from kvferry_service import logs
from kvferry_service.errors import HttpError
from kvferry_service.http_app import read_body
from kvferry_wire import pod as wire_pod
from kvferry_wire.frames import Handoff, Prefilled, encode_frame
from kvferry_wire.leg import AbortRequest, Leg

FRAMES_TYPE = "application/x-kvferry-frames"
MSGPACK_TYPE = "application/msgpack"
_WRITE_GRACE_S = 5.0  # beyond the leg's deadline, for what was written last

_decode_leg = msgspec.msgpack.Decoder(Leg).decode
_decode_abort = msgspec.msgpack.Decoder(AbortRequest).decode


def add_internal_routes(app: web.Application, pod: Pod) -> None:
    routes = _InternalRoutes(pod)
    app.router.add_post("/internal/v1/prefill", routes.prefill)
    app.router.add_post("/internal/v1/generate", routes.generate)
    app.router.add_post("/internal/v1/abort", routes.abort)
    app.router.add_post("/internal/v1/handoff", routes.handoff)
    app.router.add_post("/internal/v1/drain", routes.drain)
    app.router.add_post("/internal/v1/reset_prefix_cache", routes.reset_prefix_cache)
    app.router.add_get("/internal/v1/info", routes.info)
    app.router.add_get("/internal/v1/state", routes.state)
    app.router.add_get("/internal/v1/text", routes.text)


class _InternalRoutes:
    def __init__(self, pod: Pod) -> None:
        self._pod = pod

    async def prefill(self, request: web.Request) -> web.StreamResponse:
        leg = await self._leg(request)
        return await self._stream(request, leg, self._legs().prefill(leg))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        leg = await self._leg(request)
        return await self._stream(request, leg, self._legs().generate(leg))

    async def abort(self, request: web.Request) -> web.Response:
        self._legs().abort(await self._name(request, "an abort request"))
        return web.Response(status=204)

    async def handoff(self, request: web.Request) -> web.Response:
        if not self._legs().hand_over(await self._name(request, "a hand-off request")):
            raise HttpError(404, "No such leg runs here.", code="leg_not_found")
        return web.Response(status=204)

    async def drain(self, _: web.Request) -> web.Response:
        self._pod.engine.drain()
        return web.Response(status=204)

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        self._pod.engine.reset_prefix_cache()
        return web.Response(status=204)

    async def info(self, _: web.Request) -> web.Response:
        info = self._pod.info(self._ready())
        return web.Response(body=wire_pod.encode_json(info), content_type="application/json")

    async def state(self, _: web.Request) -> web.Response:
        try:
            snapshot = await self._pod.engine.snapshot()
        except EngineGoneError as error:
            raise self._unavailable(str(error)) from None
        return web.Response(body=snapshot, content_type=MSGPACK_TYPE)

    async def text(self, _: web.Request) -> web.Response:
        self._ready()
        assert self._pod.text is not None  # set before the engine counts as ready
        return web.Response(body=wire_pod.encode(self._pod.text.bundle), content_type=MSGPACK_TYPE)

    # ---- legs

    async def _name(self, request: web.Request, what: str) -> AbortRequest:
        body = await read_body(request, self._pod.config.limits)
        try:
            return _decode_abort(body)
        except (msgspec.DecodeError, ValueError) as error:
            raise HttpError(400, f"Not {what}: {error}") from None

    async def _leg(self, request: web.Request) -> Leg:
        body = await read_body(request, self._pod.config.limits)
        try:
            leg = _decode_leg(body)
        except (msgspec.DecodeError, ValueError) as error:
            # The message names a field and types, never a value.
            raise HttpError(400, f"Not a leg: {error}") from None
        logs.bind_request(leg.request_id[: self._pod.config.limits.request_id_chars], leg.internal_id[:128])
        return leg

    async def _stream(self, request: web.Request, leg: Leg, frames: AsyncGenerator[FrameGroup]) -> web.StreamResponse:
        """Write a leg's frames as they come. Leaving early, for whatever reason, aborts the leg."""
        response = web.StreamResponse(headers={"Content-Type": FRAMES_TYPE})
        limits = self._pod.config.limits
        try:
            deadline_s = max(0, leg.deadline_ms) / 1000 + _WRITE_GRACE_S
            async with asyncio.timeout(deadline_s) as deadline, aclosing(frames):
                async for group in frames:
                    if not response.prepared:  # not before: the engine works while the headers are written
                        await response.prepare(request)
                    if any(isinstance(frame, (Prefilled, Handoff)) for frame in group):
                        # The leg has ended; what follows is as long as its lease waits for a reader.
                        now = asyncio.get_running_loop().time()
                        deadline.reschedule(now + limits.client_stall_s + limits.lease_s + _WRITE_GRACE_S)
                    await write(response, b"".join(encode_frame(frame) for frame in group), limits)
        except TimeoutError:
            # The reader takes nothing, or the engine missed the deadline: either way this is no right end.
            raise ConnectionResetError("a leg outlived its deadline") from None
        await write_end(response, limits)
        return response

    def _legs(self) -> Legs:
        if self._pod.legs is None:
            raise self._unavailable(self._pod.not_ready())
        return self._pod.legs

    def _ready(self) -> Ready:
        ready, reason = self._pod.engine.info, self._pod.engine.not_ready()
        if ready is None or reason:
            raise self._unavailable(reason)
        return ready

    def _unavailable(self, reason: str) -> HttpError:
        return HttpError(503, f"Not ready: {reason}", retry_after_s=self._pod.config.limits.retry_after_s)
