"""The client's side of a request: bytes wait here until the client takes them, within a cap and a deadline."""

import asyncio

from aiohttp import web

from kvferry_router.flow_messages import FailAnswer, Failure, FinishAnswer, Path
from kvferry_text.errors import ApiError
from kvferry_text.sse import error_event
from kvferry_wire.limits import Limits

_PIECE = 64 * 2**10  # written at once; a client that does not take it within the stall limit has left
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
PATH_HEADER = "x-kvferry-path"


class ClientStalledError(Exception):
    """The client takes no bytes."""


class AnswerFailedError(ApiError):
    """The flow's own end in an error: recorded by it already."""

    @classmethod
    def of(cls, failure: Failure) -> "AnswerFailedError":
        error = as_api_error(failure)
        return cls(
            error.status,
            error.message,
            type=error.type,
            param=error.param,
            code=error.code,
            retry_after=error.retry_after,
        )


class _StreamAnswer(web.StreamResponse):
    """A response whose headers leave with its first chunk, in one segment."""

    _send_headers_immediately = False


def as_api_error(failure: Failure) -> ApiError:
    return ApiError(
        failure.status,
        failure.message,
        type=failure.type,
        param=failure.param,
        code=failure.code,
        retry_after=failure.retry_after_s,
    )


class Output:
    """What one request's client is yet to get."""

    def __init__(self, request: web.Request, limits: Limits) -> None:
        self._request = request
        self._limits = limits
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._path: Path = "aggregated"
        self._final: FinishAnswer | FailAnswer | None = None
        self._signal = asyncio.Event()

    def send(self, data: bytes, path: Path) -> bool:
        """Queue bytes; false when more wait than the cap allows."""
        self._path = path
        self._waiting.append(data)
        self._bytes += len(data)
        self._signal.set()
        return self._bytes <= self._limits.client_buffer_bytes

    def finish(self, final: FinishAnswer | FailAnswer) -> None:
        """Queue the end."""
        self._final = final
        self._signal.set()

    def cut(self) -> None:
        """Close the client's connection now; whoever writes to it is cancelled."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def answer(self) -> web.StreamResponse:
        """Write all to the client, until the end is written.

        Raises:
            ApiError: the answer is an error and nothing of it was sent.
            ClientStalledError: the client takes no bytes.
            ConnectionError: the client is gone.
        """
        response: web.StreamResponse | None = None
        while True:
            await self._signal.wait()
            self._signal.clear()
            final = self._final  # what was queued before it is in `_waiting`
            waiting, self._waiting, self._bytes = self._waiting, [], 0
            if waiting:
                if response is None:
                    response = await self._begin(self._path)
                await self._write(response, b"".join(waiting))
            if isinstance(final, FinishAnswer):
                return await self._finish(response, final)
            if final is not None:
                return await self._fail(response, final)

    async def _begin(self, path: Path) -> web.StreamResponse:
        response = _StreamAnswer(headers=_STREAM_HEADERS | {PATH_HEADER: path})
        await response.prepare(self._request)
        return response

    async def _finish(self, response: web.StreamResponse | None, final: FinishAnswer) -> web.StreamResponse:
        if not final.stream:
            return web.Response(body=final.data, content_type="application/json", headers={PATH_HEADER: final.path})
        if response is None:  # a stream whose whole text came with its end
            response = await self._begin(final.path)
        await self._write(response, final.data)
        async with asyncio.timeout(self._limits.client_stall_s):
            await response.write_eof()
        return response

    async def _fail(self, response: web.StreamResponse | None, final: FailAnswer) -> web.StreamResponse:
        if response is None:
            raise AnswerFailedError.of(final.failure)  # held by no name: its traceback holds this frame
        await self._write(response, error_event(as_api_error(final.failure)))
        # No last chunk: to HTTP, too, the answer is cut.
        if self._request.transport is not None:
            self._request.transport.close()
        return response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            try:
                async with asyncio.timeout(self._limits.client_stall_s):
                    await response.write(data[start : start + _PIECE])
            except TimeoutError:
                raise ClientStalledError from None
