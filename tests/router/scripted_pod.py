"""A pod for the router's tests: speaks the wire contract over real HTTP, answers by rule, and fails on demand.

The rule: an answer is ``<prompt text>`` again, byte by byte (one token each), so every answer carries its request's
marker. A ``Script`` says how one leg of one kind goes wrong; legs without a script are answered rightly. The pod notes
every leg, abort and broken connection with its time.
"""

import asyncio
import socket
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from kvferry_router.discovery.endpoints import Endpoint
from kvferry_runtime.model.text_toy import toy_text
from kvferry_runtime.model.toy_spec import ToySpec
from kvferry_service.curve import Gate, secure_server
from kvferry_text.answer import AnswerWriter
from kvferry_text.bundle import TextTools, load_text
from kvferry_wire import PROTOCOL_VERSION, pod, state
from kvferry_wire.frames import Alive, Fail, Frame, Prefilled, Tokens, encode_frame
from kvferry_wire.keys import ServiceKeys
from kvferry_wire.leg import AbortRequest, Leg
from kvferry_wire.limits import Limits
from kvferry_wire.pod import PodInfo, PodPorts, Role, TextBundle
from kvferry_wire.state import Load, Snapshot, StateEvent, StateMessage

from .builders import make_handle, make_layout

KEYS = ServiceKeys(http=b"h" * 32, state=b"s" * 32, hash=b"x" * 32)
MODEL = "toy"
BLOCK_SIZE = 16

Fault = Literal[
    "stall",  # says nothing more, keeps the connection
    "cut",  # breaks the connection
    "cut_frame",  # half a frame, then breaks it
    "half_frame",  # half a frame, then an orderly end
    "no_end",  # an orderly end without End
    "garbage",  # bytes that are no frame
    "oversize",  # a frame of 1 GiB by its length
    "busy",
    "draining",
    "internal",
    "invalid",
    "foreign_choice",
    "duplicate_end",
    "tokens_after_end",
    "lying_end",  # an End that counts more tokens than came
    "drop_tokens",  # a frame of tokens is left out
    "http_429",
    "http_422",
    "http_500_text",
    "http_502_html",
    "http_empty",
    "redirect",
    "huge_header",
    "no_http",
]


@dataclass(frozen=True, slots=True)
class Script:
    """How one leg goes. ``after``: tokens (decode) or ``Alive`` frames (prefill) before the fault."""

    fault: Fault | None = None
    after: int = 0
    pause_s: float = 0.0  # before each token, or before Prefilled
    one_byte: bool = False  # each byte in a segment of its own
    handle: bool = True
    open_s: float = 0.0  # the stream stays open for so long after its last frame


class ScriptedPod:
    """One pod on a free port of 127.0.0.1."""

    def __init__(
        self, name: str, role: Role, *, compat: str = "compat", bundle: TextBundle | None = None, context: int = 2048
    ) -> None:
        self.name = name
        self.role: Role = role
        self.compat = compat
        self.context = context  # tokens of prompt and answer
        self.incarnation = bytes(16)
        self.ready = True
        self.gone_after_fault = False  # not ready from its next fault on
        self.reply_delay_s = 0.0  # of probes
        self.model = MODEL
        self.bundle = bundle or TOY_BUNDLE
        self.tools: TextTools = load_text(self.bundle, Limits()) if bundle is not None else toy_tools()
        self.scripts: dict[str, deque[Script]] = defaultdict(deque)
        self.default: dict[str, Script] = {"prefill": Script(), "decode": Script()}
        self.legs: list[tuple[str, Leg]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts: list[AbortRequest] = []
        self.broken: list[str] = []  # kinds of legs whose connection the router closed
        self.running = 0
        self.info_calls = 0
        self.text_calls = 0
        self.port = 0
        self.state_port = 9  # nobody listens there unless a stream is opened
        self.sequence = 0
        self.hashes: list[bytes] = []
        self._publisher: zmq.asyncio.Socket | None = None
        self._runner: web.AppRunner | None = None
        self.changed = asyncio.Event()

    # ---- running -----------------------------------------------------------------------------------------------

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 * 2**20, middlewares=[self._guard])
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/internal/v1/info", self._info)
        app.router.add_get("/internal/v1/text", self._text)
        app.router.add_get("/internal/v1/state", self._state)
        app.router.add_post("/internal/v1/prefill", self._prefill)
        app.router.add_post("/internal/v1/generate", self._generate)
        app.router.add_post("/internal/v1/abort", self._abort)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await self._runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()

    async def stop(self) -> None:
        """Close all connections, as a killed process would."""
        if self._runner is not None:
            for connection in list(self._runner.server.connections if self._runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    @asynccontextmanager
    async def stream(self, key: bytes = KEYS.state) -> AsyncIterator[None]:
        """The state stream, under CURVE."""
        context = zmq.asyncio.Context()
        gate = Gate(context)
        gate.admit("state", key)
        gate.start()
        socket_ = context.socket(zmq.XPUB)  # a PUB that tells of its subscriptions
        secure_server(socket_, key, "state")  # type: ignore[arg-type]  # options only
        self.state_port = socket_.bind_to_random_port("tcp://127.0.0.1")
        self._publisher = socket_
        try:
            yield
        finally:
            self._publisher = None
            socket_.close(0)
            gate.close()
            context.destroy(0)

    async def subscribed(self) -> None:
        """Until a subscription has come: what is published from here on is heard."""
        assert self._publisher is not None
        async with asyncio.timeout(5.0):
            while not (await self._publisher.recv()).startswith(b"\x01"):
                pass

    async def publish(self, event: StateEvent, *, lose: bool = False) -> None:
        """Number an event and send it, or lose it."""
        self.sequence += 1
        if not lose and self._publisher is not None:
            message = StateMessage(incarnation=self.incarnation, sequence=self.sequence, event=event)
            await self._publisher.send(state.encode(message))

    def endpoint(self) -> Endpoint:
        return Endpoint(name=self.name, role=self.role, host="127.0.0.1", http=self.port, state=self.state_port)

    # ---- questions ---------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/readyz" and request.headers.get("Authorization") != f"Bearer {KEYS.bearer()}":
            return web.Response(status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.reply_delay_s:
            await asyncio.sleep(self.reply_delay_s)
        if not self.ready:
            return web.json_response({"ready": False, "reason": "loading"}, status=503)
        return web.json_response({"ready": True})

    async def _info(self, _: web.Request) -> web.Response:
        self.info_calls += 1
        info = PodInfo(
            version="0",
            protocol_version=PROTOCOL_VERSION,
            incarnation=self.incarnation.hex(),
            epoch=1,
            role=self.role,
            model=self.model,
            model_digest="m",
            text_digest=self.bundle.digest,
            compat_hash=self.compat,
            dtype="int64",
            threads=1,
            block_size=BLOCK_SIZE,
            total_blocks=1000,
            max_model_len=self.context,
            max_running=64,
            token_budget=512,
            layout=make_layout(),
            ports=PodPorts(http=self.port, control=0, data=0, state=self.state_port),
            transfer_backends={},
            attention_backends={},
            draining=False,
            limits=Limits(),
        )
        return web.Response(body=pod.encode_json(info), content_type="application/json")

    async def _text(self, _: web.Request) -> web.Response:
        self.text_calls += 1
        return web.Response(body=pod.encode(self.bundle))

    async def _state(self, _: web.Request) -> web.Response:
        snapshot = Snapshot(
            incarnation=self.incarnation, sequence=self.sequence, hashes=tuple(self.hashes), load=make_load()
        )
        return web.Response(body=state.encode(snapshot))

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts.append(msgspec.msgpack.decode(await request.read(), type=AbortRequest))
        self.changed.set()
        return web.Response(status=204)

    # ---- legs --------------------------------------------------------------------------------------------------

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        return await self._leg(request, "prefill")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._leg(request, "decode")

    async def _leg(self, request: web.Request, kind: str) -> web.StreamResponse:
        leg = msgspec.msgpack.decode(await request.read(), type=Leg)
        self.legs.append((kind, leg))
        self.headers.append(dict(request.headers))
        self.changed.set()
        script = self.scripts[kind].popleft() if self.scripts[kind] else self.default[kind]
        refusal = _by_status(script.fault)
        if refusal is not None:
            return refusal
        if script.fault == "no_http":
            assert request.transport is not None
            request.transport.write(b"SSH-2.0-whatever\r\n")  # type: ignore[attr-defined]
            request.transport.close()
        self.running += 1
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/x-kvferry-frames"})
            await response.prepare(request)
            frames = self._prefill_frames(leg, script) if kind == "prefill" else self._decode_frames(leg, script)
            async for frame in frames:
                if isinstance(frame, Frame):
                    await self._write(response, encode_frame(frame), script)
                elif frame == "cut":
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                else:
                    await self._write(response, frame, script)
            await asyncio.sleep(script.open_s)
            await response.write_eof()
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.broken.append(kind)
            self.changed.set()
            raise
        finally:
            self.running -= 1

    async def _write(self, response: web.StreamResponse, data: bytes, script: Script) -> None:
        if not script.one_byte:
            await response.write(data)
            return
        for index in range(len(data)):
            await response.write(data[index : index + 1])
            await asyncio.sleep(0)

    async def _prefill_frames(self, leg: Leg, script: Script) -> AsyncIterator[Frame | bytes | str]:
        for step in range(script.after):
            yield Alive(step=step + 1)
        if script.pause_s:
            await asyncio.sleep(script.pause_s)
        first = self.answer_ids(leg)[0]
        good = Prefilled(
            first=(first,) * len(leg.choices),
            cached_tokens=0,
            handle=make_handle(tokens=len(leg.prompt_ids)) if script.handle else None,
        )
        async for frame in self._faulty(script, good):
            yield frame

    async def _decode_frames(self, leg: Leg, script: Script) -> AsyncIterator[Frame | bytes | str]:
        writer = AnswerWriter(leg, self.tools.tokenizer)
        answer = self.answer_ids(leg)
        sent = 0
        if opening := writer.opening():
            yield Tokens(choice=0, ids=(), data=opening)
        for choice, written in writer.catch_up():
            if written.data:
                yield Tokens(choice=choice, ids=(), data=written.data, chars=written.chars)
        for choice, state_ in enumerate(leg.choices):
            for position in range(len(state_.emitted), len(answer)):
                if script.fault is not None and sent == script.after:
                    async for faulty in self._faulty(script, None):
                        yield faulty
                    if script.fault not in ("duplicate_end", "tokens_after_end", "lying_end", "drop_tokens"):
                        return
                if script.pause_s:
                    await asyncio.sleep(script.pause_s)
                finish = "length" if position + 1 == len(answer) else None
                written = writer.push(choice, (answer[position],), finish, None)
                if not (script.fault == "drop_tokens" and sent == script.after):
                    yield Tokens(choice=choice, ids=written.ids, data=written.data, chars=written.chars)
                sent += 1
        end = writer.end(leg.cached_tokens, leg.recompute)
        if script.fault == "lying_end":
            end = msgspec.structs.replace(end, completion_tokens=end.completion_tokens + 1)
        yield end
        if script.fault == "duplicate_end":
            yield end
        if script.fault == "tokens_after_end":
            yield Tokens(choice=0, ids=(65,), data=b"data: {}\n\n" if leg.format.stream else b"", chars=1)

    async def _faulty(self, script: Script, good: Frame | None) -> AsyncIterator[Frame | bytes | str]:
        whole = encode_frame(good or Alive(step=1))
        if script.fault is not None and self.gone_after_fault:
            self.ready = False
        match script.fault:
            case None:
                assert good is not None
                yield good
            case "stall":
                await asyncio.Event().wait()
            case "cut":
                yield "cut"
            case "cut_frame":
                yield whole[: len(whole) // 2]
                await asyncio.sleep(0.01)
                yield "cut"
            case "half_frame":
                yield whole[: len(whole) // 2]
            case "garbage":
                yield (5).to_bytes(4, "little") + b"hello"
            case "oversize":
                yield (2**30).to_bytes(4, "little") + bytes(1000)
            case "busy" | "draining" | "internal" | "invalid":
                param = "messages" if script.fault == "invalid" else None
                yield Fail(kind=script.fault, message=f"scripted: {script.fault}", param=param)
            case "foreign_choice":
                yield Tokens(choice=7, ids=(65,), data=b"data: foreign\n\n", chars=1)
            case _:
                pass

    def answer_ids(self, leg: Leg) -> tuple[int, ...]:
        """The prompt again, cut to what was asked for."""
        return leg.prompt_ids[: leg.sampling.max_tokens]

    async def wait_for(self, condition: Any, timeout_s: float = 2.0) -> None:
        """Until a condition on this pod's notes holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                try:
                    async with asyncio.timeout(0.02):
                        await self.changed.wait()
                except TimeoutError:
                    pass  # what changes without a note is looked at again


def make_load(**changes: Any) -> Load:
    values: dict[str, Any] = {
        "running": 0,
        "waiting": 0,
        "queued_tokens": 0,
        "free_blocks": 1000,
        "total_blocks": 1000,
        "leases": 0,
        "draining": False,
    }
    return Load(**(values | changes))


def _by_status(fault: Fault | None) -> web.Response | None:
    error = {"error": {"message": "scripted", "type": "x", "param": "messages", "code": None}}
    match fault:
        case "http_429":
            return web.json_response(error, status=429, headers={"Retry-After": "7"})
        case "http_422":
            return web.json_response(error, status=422)
        case "http_500_text":
            return web.Response(status=500, text="Traceback: 0xdeadbeef /secret/path")
        case "http_502_html":
            return web.Response(status=502, text="<html>upstream connect error</html>", content_type="text/html")
        case "http_empty":
            return web.Response(status=500)
        case "redirect":
            return web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"})
        case "huge_header":
            return web.Response(status=200, headers={"X-Huge": "x" * 100_000})
    return None


TOY_BUNDLE = toy_text(ToySpec())


@cache
def toy_tools() -> TextTools:
    return load_text(TOY_BUNDLE, Limits())
