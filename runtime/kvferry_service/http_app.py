"""A hardened aiohttp application: every port of ours that speaks HTTP is built by ``build_app`` and ``HttpServer``.

One middleware, from the outside in: request id, sane headers, authentication (default deny), then the handler; every
error leaves in OpenAI's shape and says nothing of our insides. What the parser itself refuses (see
``http_protocol``) has the same shape.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler

from kvferry_service import auth, logs
from kvferry_service.errors import HttpError
from kvferry_service.http_protocol import SERVER_NAME, HardenedProtocol, ProtocolLimits
from kvferry_service.ids import new_id
from kvferry_wire.limits import Limits

REQUEST_ID = web.RequestKey("request_id", str)
IDENTITY = web.RequestKey("identity", str)

_REQUEST_ID = re.compile(r"[\x21-\x7e]+")
_KEEPALIVE_S = 75.0
_CLOSE_S = 5.0  # for running handlers, when the server closes
_log = logs.get_logger(__name__)

# An exception of a layer above, as an answer; None: it is a failure of ours (500).
Translate = Callable[[Exception], HttpError | None]


def build_app(
    limits: Limits,
    authenticate: auth.Authenticate,
    *,
    translate: Translate | None = None,
    open_routes: frozenset[tuple[str, str]] = auth.OPEN_ROUTES,
) -> web.Application:
    """An application without routes, with the middleware and caps.

    Args:
        authenticate: asked for every route outside ``open_routes``, unknown ones included.
        translate: turns exceptions of the caller's layers into answers.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = request_id = accept_request_id(request.headers.get("x-request-id"), limits)
        logs.bind_request(request_id)
        try:
            _check_headers(request)
            if not auth.is_open(request, open_routes):
                identity = authenticate(request.headers.get("Authorization", ""))
                if identity is None:
                    raise HttpError(
                        401, "A valid API key is needed: Authorization: Bearer KEY.", code="invalid_api_key"
                    )
                request[IDENTITY] = identity
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - the edge: each becomes an answer, unknown ones are logged as failures
            return _error_response(request, error, translate)

    app = web.Application(middlewares=[guard], client_max_size=limits.body_bytes)
    app.on_response_prepare.append(_common_headers)
    return app


def accept_request_id(given: str | None, limits: Limits) -> str:
    """The client's request id if it is fit to be echoed and logged, else a new one."""
    if given is not None and 0 < len(given) <= limits.request_id_chars and _REQUEST_ID.fullmatch(given):
        return given
    return new_id("req")


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """The whole body, bounded in size and time. Raises ``HttpError`` 413 or 408."""
    too_large = HttpError(413, f"The request body is larger than {limits.body_bytes} bytes.", code="body_too_large")
    if request.content_length is not None and request.content_length > limits.body_bytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await request.read()
    except TimeoutError:
        raise HttpError(408, f"The request body did not arrive within {limits.body_timeout_s:g} s.") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None


def is_loopback(host: str) -> bool:
    """Whether an address names this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_headers(request: web.Request) -> None:
    for name in ("Host", "Content-Length", "Transfer-Encoding", "Authorization", "Content-Type"):
        if len(request.headers.getall(name, [])) > 1:
            raise HttpError(400, f"The header {name} was sent more than once.")
    if "Content-Length" in request.headers and "Transfer-Encoding" in request.headers:
        raise HttpError(400, "Content-Length and Transfer-Encoding exclude each other.")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpError(415, "Compressed request bodies are not accepted.")


async def _common_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER_NAME
    response.headers["X-Content-Type-Options"] = "nosniff"
    if (request_id := request.get(REQUEST_ID)) is not None:
        response.headers["x-request-id"] = request_id


def _error_response(request: web.Request, error: Exception, translate: Translate | None) -> web.Response:
    if request.writer.output_size > 0:
        # The answer has begun: nothing but a cut connection can tell that it did not end well.
        if not isinstance(error, ConnectionError):
            _log.error("an answer broke off", exc_info=error)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the answer broke off") from error
    answer = _as_http_error(request, error, translate)
    response = web.Response(status=answer.status, body=answer.body(), content_type="application/json")
    if answer.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if answer.status == 405 and isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    if answer.retry_after_s is not None:
        response.headers["Retry-After"] = str(answer.retry_after_s)
    if request.can_read_body and not request.content.is_eof():
        response.force_close()  # the rest of a body that nobody will read
    return response


def _as_http_error(request: web.Request, error: Exception, translate: Translate | None) -> HttpError:
    if isinstance(error, HttpError):
        return error
    if isinstance(error, web.HTTPNotFound):
        return HttpError(404, f"There is no route {request.method} {request.path[:200]}.", code="route_not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return HttpError(405, f"{request.path[:200]} does not accept {request.method}.", code="method_not_allowed")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return HttpError(413, "The request body is too large.", code="body_too_large")
    if isinstance(error, web.HTTPException):
        return HttpError(error.status, HTTPStatus(error.status).phrase)
    if isinstance(error, (web.RequestPayloadError, ConnectionError)):
        return HttpError(400, "The request body could not be read.")
    if translate is not None and (known := translate(error)) is not None:
        return known
    _log.error("a request failed", exc_info=error, extra=logs.fields(method=request.method))
    return HttpError(500, "The server failed; the request id names its log line.", code="internal_error")


class HttpServer:
    """An application on its listening sockets."""

    def __init__(self, app: web.Application, limits: Limits, *, internal: bool, close_s: float = _CLOSE_S) -> None:
        """``internal``: both ends are ours; a peer that acknowledges nothing is given up soon (TCP_USER_TIMEOUT)."""
        # The library waits twice for so long: for a handler's end, and once more after its body was cut.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=close_s / 2,
            keepalive_timeout=_KEEPALIVE_S,
        )
        self._limits = ProtocolLimits(
            connections=limits.connections,
            header_line_bytes=limits.header_bytes,
            header_timeout_s=limits.header_timeout_s,
            user_timeout_ms=int(2000 * limits.stall_timeout_s) if internal else 0,
            keepalive_s=_KEEPALIVE_S,
        )
        self._servers: list[asyncio.Server] = []
        self._draining = False
        app.on_response_prepare.append(self._say_close)

    async def start(self, *listeners: socket.socket) -> None:
        """Serve on bound sockets (``listen``)."""
        await self._runner.setup()
        manager = self._runner.server
        assert manager is not None  # set by setup()
        loop = asyncio.get_running_loop()

        def protocol() -> HardenedProtocol:
            return HardenedProtocol(manager, loop, self._limits)

        for listener in listeners:
            self._servers.append(await loop.create_server(protocol, sock=listener, backlog=1024))

    def drain(self) -> None:
        """Close each kept connection now or after its answer, so that clients come back by another, perhaps elsewhere.

        New ones are still taken, for one request each.
        """
        self._draining = True
        assert self._runner.server is not None  # started
        for connection in self._runner.server.connections:
            assert isinstance(connection, HardenedProtocol)
            connection.drain()

    async def _say_close(self, _: web.Request, response: web.StreamResponse) -> None:
        if self._draining:
            response.headers["Connection"] = "close"
            response.force_close()

    async def close(self) -> None:
        """Accept nothing more, give running handlers ``close_s`` seconds, then cut."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()


def listen(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 takes a free one. Raises ``OSError`` naming the address when it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
