"""The connection under the application: what happens before a request is whole, and what the parser refuses."""

import asyncio
import socket
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, LineTooLong

from kvferry_service import logs
from kvferry_service.errors import error_body

SERVER_NAME = "kvferry"

_HEADERS = 100  # of one request
_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProtocolLimits:
    """Caps of one connection and of all connections of a port."""

    connections: int
    header_line_bytes: int
    header_timeout_s: float  # from a request's first byte (or the connection) to the end of its headers
    user_timeout_ms: int  # TCP_USER_TIMEOUT; 0 leaves the kernel's
    keepalive_s: float


class HardenedProtocol(web.RequestHandler):
    """aiohttp's connection handler with a connection cap, a deadline for headers and errors in OpenAI's shape."""

    __slots__ = ("_header_deadline", "_limits", "_server")

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, limits: ProtocolLimits) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # typed as a logger, documented and handled as optional
            max_line_size=limits.header_line_bytes,
            max_field_size=limits.header_line_bytes,
            max_headers=_HEADERS,
            lingering_time=1.0,
            auto_decompress=False,
            keepalive_timeout=limits.keepalive_s,
        )
        self._server = server
        self._limits = limits
        self._header_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._server.connections) > self._limits.connections:
            _log.warning("connection refused: too many", extra=logs.fields(limit=self._limits.connections))
            self.force_close()
            return
        peer: socket.socket | None = transport.get_extra_info("socket")
        if self._limits.user_timeout_ms and peer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._limits.user_timeout_ms)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._headers_arrived()
        elif self._waiter is not None and self._header_deadline is None:
            self._expect_headers()  # the first bytes of a request that is not whole

    def connection_lost(self, exc: BaseException | None) -> None:
        self._headers_arrived()
        super().connection_lost(exc)

    def drain(self) -> None:
        """Close now where no request is under way or arriving; else after its answer."""
        if self._waiter is not None and self._header_deadline is None:
            self.force_close()
        else:
            self._close = True  # the library's `close` would forget a request that is arriving

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what the parser refused, and failures outside the application's middleware."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        if isinstance(exc, LineTooLong):
            status, text = 431, f"A header line is longer than {self._limits.header_line_bytes} bytes."
        elif isinstance(exc, BadHttpMethod):
            status, text = 400, "Not an HTTP request."
        elif status < 500:
            text = "The request is not valid HTTP."
        else:
            text = "The server failed."
            _log.error("a request failed outside its handler", exc_info=exc)
        response = web.Response(status=status, body=error_body(status, text), content_type="application/json")
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        return response

    def _expect_headers(self) -> None:
        self._header_deadline = self._loop.call_later(self._limits.header_timeout_s, self._headers_late)

    def _headers_arrived(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _headers_late(self) -> None:
        self._header_deadline = None
        # A handler that waits for its next request has none running: nothing else is cut.
        if self._waiter is not None:
            self.force_close()
