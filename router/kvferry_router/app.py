"""The router's HTTP side: OpenAI's routes, health, metrics and the explain API, over pool, text service and proxy."""

import asyncio
import time
from collections.abc import Callable

import msgspec
from aiohttp import web
from pydantic import BaseModel

from kvferry_router import failures
from kvferry_router.admission import Admission, BodyBudget
from kvferry_router.entropy import Entropy
from kvferry_router.flow_messages import Outcome
from kvferry_router.moves import Mover
from kvferry_router.output import AnswerFailedError, as_api_error
from kvferry_router.proxy import Proxy, RequestRun
from kvferry_router.select.candidates import Ask
from kvferry_router.select.policy import Decision
from kvferry_router.tenants import salter
from kvferry_router.text_service import TextService
from kvferry_router.underway import Underway
from kvferry_service import auth, logs
from kvferry_service.errors import HttpError, translator
from kvferry_service.health import add_health_routes
from kvferry_service.http_app import IDENTITY, REQUEST_ID, build_app, read_body
from kvferry_service.metrics import add_metrics_route
from kvferry_text.bundle import TextTools
from kvferry_text.errors import ApiError, model_not_found
from kvferry_text.openai.models import ModelList, find_model, model_list
from kvferry_text.openai.parameters import Kind
from kvferry_text.prepare import PreparedRequest, first_leg
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.keys import ServiceKeys
from kvferry_wire.leg import Leg

_GROWTH_TOKENS = 256  # of one choice, that room is looked for: most answers are shorter than what they may be
_POLL_S = 0.02
_log = logs.get_logger(__name__)


class RouterApp:
    """The handlers and what they share."""

    def __init__(
        self,
        *,
        proxy: Proxy,
        text: TextService,
        keys: ServiceKeys,
        model: str,
        deadline_s: float,
        authenticate: auth.Authenticate,
        why_closed: Callable[[], str] = lambda: "",
    ) -> None:
        """``why_closed``: why ``authenticate`` lets nobody in; empty when it lets somebody."""
        self._proxy = proxy
        self._text = text
        self._salt = salter(keys.hash)
        self._model = model
        self._deadline_s = deadline_s
        self._limits = proxy.limits
        self._admission = Admission(proxy.limits)
        self._bodies = BodyBudget(proxy.limits)
        self._underway = Underway()
        self._entropy = Entropy()
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._created = int(time.time())
        self._stopping = ""
        self._internal = auth.bearer({keys.bearer(): "service"})
        # Internal routes ask for the service's own key, whatever clients must show.
        self._open = auth.OPEN_ROUTES | {
            (method, path) for method in ("GET", "HEAD") for path in ("/readyz/router", "/internal/v1/decisions")
        }
        self._joined = False  # whether it once knew all that it needs to answer as well as any other router
        self._authenticate = authenticate
        self._why_closed = why_closed

    def build(self) -> web.Application:
        app = build_app(
            self._limits, self._authenticate, translate=translator(ApiError), open_routes=frozenset(self._open)
        )
        add_health_routes(app, live=lambda: "", ready=self.why_not_ready, parts={"router": self.why_no_traffic})
        add_metrics_route(app, self._proxy.metrics.registry)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._one_model)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/internal/v1/decisions", self._decisions)
        return app

    async def move(self) -> None:
        """Take running answers away from pods that drain, until cancelled."""
        await Mover(self._proxy.pool, self._underway.runs, self._limits).run()

    async def stop(self, grace_s: float) -> None:
        """Not ready from now on, and nothing new; what is under way gets the grace, and then fails."""
        self._stopping = "stopping"
        await self._underway.end(grace_s)

    def why_not_ready(self) -> str:
        """Why a request would not be answered now; empty when it would."""
        if self._stopping:
            return self._stopping
        reason = self._why_closed() or self._proxy.pool.why_not_ready()
        if reason:
            return reason
        return "" if self._tools() is not None else "no decode pod's text bundle is loaded"

    def why_no_traffic(self) -> str:
        """Why clients should rather be sent to another router of the service; empty when they may come here.

        A router that once knew what there is to know takes traffic until it stops. Without pods every router of the
        service would answer 503 alike, which tells a client more than an address behind which nobody listens.
        """
        if reason := self._stopping or self._why_closed():
            return reason
        if not self._joined:
            pool = self._proxy.pool
            reason = pool.undiscovered or (self.why_not_ready() if pool.expected("decode") else "")
            self._joined = not reason
        return reason

    # ---- small routes ------------------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        return _json(self._model_list())

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._model:  # also while no pod is there to tell more of the model
            raise model_not_found(name)
        return _json(find_model(self._model_list(), name))

    def _model_list(self) -> ModelList:
        length = self._proxy.pool.context_length()
        if length is None:
            raise as_api_error(failures.NO_CAPACITY)
        return model_list((self._model,), created=self._created, max_model_len=length)

    async def _decisions(self, request: web.Request) -> web.Response:
        if self._internal(request.headers.get("Authorization", "")) is None:
            raise HttpError(401, "The service's own key is needed.", code="invalid_api_key")
        found = self._proxy.pool.decisions.newest_first()
        return web.Response(body=msgspec.json.encode({"decisions": found}), content_type="application/json")

    # ---- answers -----------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completion")

    async def _generate(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        """Read, admit, prepare, choose, and work on it until its client has the answer."""
        accepted_at = asyncio.get_running_loop().time()
        internal_id = self._entropy.new_id("leg")
        logs.bind_request(request[REQUEST_ID], internal_id)
        begun = False
        try:
            with self._underway.request():
                async with self._underway.preparing():
                    body = await self._read(request, internal_id)
                    await self._admit(internal_id)
                    begun = True
                    self._proxy.metrics.inflight.inc()
                    run, decision = await self._prepare(request, kind, body, internal_id, accepted_at=accepted_at)
                with self._underway.answering(run):
                    return await run.answer(decision)
        except ApiError as error:
            self._refused(error, accepted_at)
            raise
        finally:
            if begun:
                self._proxy.metrics.inflight.dec()
            self._leave(internal_id)
            self._bodies.give_back(internal_id)

    async def _read(self, request: web.Request, internal_id: str) -> bytes:
        """The body. Raises ``ApiError`` 429 when those of other requests leave no room for it, and as ``read_body``."""
        if not self._bodies.take(internal_id, request.content_length):
            raise as_api_error(failures.QUEUE_FULL)
        body = await read_body(request, self._limits)
        self._bodies.read(internal_id, len(body))
        return body

    async def _prepare(
        self, request: web.Request, kind: Kind, body: bytes, internal_id: str, *, accepted_at: float
    ) -> tuple[RequestRun, Decision]:
        """The request as a run that has yet to begin, and where it begins."""
        until = accepted_at + self._deadline_s
        tools = self._tools()
        if tools is None:
            # A request that no pod could answer is told so now: to come again later would not help its client.
            await self._text.check(kind, body, until=until)
            tools = await self._wait_for_tools()
        pool = self._proxy.pool
        extras = KeyExtras(tenant_salt=self._salt(request[IDENTITY]))
        prepared, hashes = await self._text.prepare(
            kind,
            body,
            tools,
            pool.block_sizes(),
            extras,
            contexts=pool.contexts(tools.bundle.digest),
            until=until,
        )
        leg = self._first_leg(prepared, internal_id, request[REQUEST_ID], extras)
        ask = Ask(
            internal_id=internal_id,
            prompt_tokens=len(leg.prompt_ids),
            answer_tokens=prepared.sampling.max_tokens,
            growth_tokens=prepared.n * min(prepared.sampling.max_tokens, _GROWTH_TOKENS),
            text_digest=tools.bundle.digest,
        )
        if self._proxy.suspects.holds(leg, asyncio.get_running_loop().time()):
            raise as_api_error(failures.BARREN)
        decision = pool.choose(ask, hashes, asyncio.get_running_loop().time())
        if decision.decode is None:
            raise as_api_error(failures.NO_CAPACITY)
        run = RequestRun(self._proxy, request, leg, ask, hashes, deadline_s=self._deadline_s, accepted_at=accepted_at)
        return run, decision

    def _first_leg(self, prepared: PreparedRequest, internal_id: str, request_id: str, extras: KeyExtras) -> Leg:
        return first_leg(
            prepared,
            internal_id=internal_id,
            request_id=request_id,
            response_id=self._entropy.new_id("chatcmpl" if prepared.kind == "chat" else "cmpl"),
            created=int(time.time()),
            seed=self._entropy.seed(),
            deadline_ms=int(1000 * self._deadline_s),
            extras=extras,
        )

    def _refused(self, error: ApiError, accepted_at: float) -> None:
        """Requests that end before a flow is made of them are counted here; a flow records its own."""
        if isinstance(error, AnswerFailedError):
            return
        outcome: Outcome = "unavailable" if error.status >= 500 else "invalid"
        for failure in (failures.QUEUE_FULL, failures.DEADLINE, failures.STOPPING, failures.BARREN):
            if error.code == failure.code:
                outcome = failure.outcome
        self._proxy.metrics.requests.labels(outcome, "none").inc()
        _log.info(
            "request refused",
            extra=logs.fields(
                outcome=outcome,
                status=error.status,
                code=error.code,
                duration_ms=round(1000 * (asyncio.get_running_loop().time() - accepted_at), 1),
            ),
        )

    # ---- admission ---------------------------------------------------------------------------------------------

    async def _admit(self, internal_id: str) -> None:
        """Raises ``ApiError`` 429 when there is no place, at once or within the queue's time and the request's own."""
        placed = self._admission.arrive(internal_id)
        if placed == "full":
            raise as_api_error(failures.QUEUE_FULL)
        if placed == "run":
            return
        turn = self._turns[internal_id] = asyncio.get_running_loop().create_future()
        self._proxy.metrics.queued.set(self._admission.waiting)
        try:
            async with asyncio.timeout(min(self._limits.queue_wait_s, self._deadline_s)):
                await turn
        except TimeoutError:
            raise as_api_error(failures.QUEUE_FULL) from None
        finally:
            self._turns.pop(internal_id, None)

    def _leave(self, internal_id: str) -> None:
        for following in self._admission.leave(internal_id):
            if (turn := self._turns.get(following)) is not None and not turn.done():
                turn.set_result(None)
        self._proxy.metrics.queued.set(self._admission.waiting)

    # ---- capacity ----------------------------------------------------------------------------------------------

    def _tools(self) -> TextTools | None:
        digest = self._proxy.pool.text_digest(self._text.digests())
        return None if digest is None else self._text.tools(digest)

    async def _wait_for_tools(self) -> TextTools:
        """The text tools of a pod that could answer; a pod that comes back within a moment is waited for."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(self._limits.capacity_wait_s, self._deadline_s)
        while (tools := self._tools()) is None:
            if loop.time() >= until:
                raise as_api_error(failures.NO_CAPACITY)
            await asyncio.sleep(_POLL_S)
        return tools


def _json(body: BaseModel) -> web.Response:
    return web.Response(body=msgspec.json.encode(body.model_dump()), content_type="application/json")
