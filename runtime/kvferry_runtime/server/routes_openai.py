"""``/v1`` of a pod by itself (``kvferry serve``): a request becomes one leg, prefilled and decoded here."""

import asyncio
import secrets
import time
from contextlib import aclosing

import msgspec
from aiohttp import web

from kvferry_runtime.server.legs import FrameGroup, Legs
from kvferry_runtime.server.pod import Pod
from kvferry_runtime.server.writing import write, write_end
from kvferry_service import logs
from kvferry_service.http_app import REQUEST_ID, read_body
from kvferry_service.ids import new_id
from kvferry_text import errors, sse
from kvferry_text.bundle import TextTools
from kvferry_text.openai.models import find_model
from kvferry_text.openai.parameters import Kind
from kvferry_text.prepare import first_leg, prepare
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import Alive, End, Fail, Tokens
from kvferry_wire.leg import Leg

PATH_HEADER = "x-kvferry-path"
PATH = "aggregated"  # one pod has no other way
_WRITE_GRACE_S = 5.0


def add_openai_routes(app: web.Application, pod: Pod) -> None:
    routes = _OpenAIRoutes(pod)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{name:.+}", routes.model)
    app.router.add_post("/v1/chat/completions", routes.chat)
    app.router.add_post("/v1/completions", routes.completion)


class _OpenAIRoutes:
    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._limits = pod.config.limits

    async def models(self, _: web.Request) -> web.Response:
        return _json(msgspec.json.encode(self._pod.models().model_dump()))

    async def model(self, request: web.Request) -> web.Response:
        card = find_model(self._pod.models(), request.match_info["name"])
        return _json(msgspec.json.encode(card.model_dump()))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "chat")

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "completion")

    async def _answer(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        started = asyncio.get_running_loop().time()
        body = await read_body(request, self._limits)
        tools, legs = self._tools()
        # In a thread: a long text takes a while, and other streams go on.
        prepared = await asyncio.to_thread(
            prepare,
            kind,
            body,
            tools.bundle,
            tools.tokenizer,
            tools.template,
            self._limits,
            (self._pod.config.served_name,),
            (self._pod.context(),),
        )
        deadline_s = self._limits.request_deadline_s - (asyncio.get_running_loop().time() - started)
        internal_id = new_id("int")
        logs.bind_request(request[REQUEST_ID], internal_id)
        leg = first_leg(
            prepared,
            internal_id=internal_id,
            request_id=request[REQUEST_ID],
            response_id=new_id("chatcmpl" if kind == "chat" else "cmpl"),
            created=int(time.time()),
            seed=secrets.randbits(63),
            deadline_ms=int(deadline_s * 1000),
            extras=KeyExtras(),
        )
        try:
            async with asyncio.timeout(deadline_s + _WRITE_GRACE_S):
                if leg.format.stream:
                    return await self._stream(request, legs, leg)
                return await self._whole(legs, leg)
        except TimeoutError:
            raise errors.deadline_exceeded("The request's time is up.") from None

    async def _whole(self, legs: Legs, leg: Leg) -> web.Response:
        async with aclosing(legs.generate(leg)) as groups:
            async for group in groups:
                for frame in group:
                    if isinstance(frame, Fail):
                        raise errors.from_fail(frame, self._limits)
                    if isinstance(frame, End):
                        return _json(frame.data, {PATH_HEADER: PATH})
        raise errors.internal()

    async def _stream(self, request: web.Request, legs: Legs, leg: Leg) -> web.StreamResponse:
        """Headers wait for the first token or the first second, so that a refusal still gets its own status."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                PATH_HEADER: PATH,
            }
        )
        held = b""
        async with aclosing(legs.generate(leg)) as groups:
            async for group in groups:
                data, fail, begun = _sse_bytes(group)
                if fail is not None:
                    error = errors.from_fail(fail, self._limits)
                    if not response.prepared:
                        raise error
                    await write(response, held + data + sse.error_event(error), self._limits)
                    # No last chunk: to HTTP, too, the answer is cut.
                    if request.transport is not None:
                        request.transport.close()
                    return response
                held += data
                if not response.prepared:
                    if not begun:
                        continue
                    await response.prepare(request)
                if held:
                    await write(response, held, self._limits)
                    held = b""
        await write_end(response, self._limits)
        return response

    def _tools(self) -> tuple[TextTools, Legs]:
        reason = self._pod.not_ready()
        tools, legs = self._pod.text, self._pod.legs
        if reason or tools is None or legs is None:
            raise errors.unavailable(f"not ready: {reason}", retry_after=self._limits.retry_after_s)
        return tools, legs


def _sse_bytes(group: FrameGroup) -> tuple[bytes, Fail | None, bool]:
    """A group's bytes, its failure, and whether the answer has begun: a token, a second's wait, or the end."""
    data, begun = b"", False
    for frame in group:
        if isinstance(frame, Fail):
            return data, frame, begun
        if isinstance(frame, (Tokens, End)):
            data += frame.data
        begun |= isinstance(frame, (Alive, End)) or (isinstance(frame, Tokens) and bool(frame.ids))
    return data, None, begun


def _json(body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=headers)
