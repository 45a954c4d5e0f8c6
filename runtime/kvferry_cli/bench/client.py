"""The load generator's requests: streamed completions, and when each piece of text came."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry_cli.bench.load import Request
from kvferry_cli.bench.records import Trace

if TYPE_CHECKING:
    import aiohttp

MAX_LINE_BYTES = 2**20
MAX_ERROR_CHARS = 500


class AnswerError(Exception):
    """An answer that is not what was asked for: the benchmark ends and shows no figures."""


class EventLines:
    """Cuts a stream of bytes into the data of server-sent events. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is complete now. Raises ``AnswerError`` for a line beyond all bounds."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise AnswerError(f"an event of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Client:
    """Asks one endpoint."""

    def __init__(self, session: "aiohttp.ClientSession", endpoint: str, model: str) -> None:
        self._session = session
        self._url = f"{endpoint}/v1/completions"
        self._model = model

    def begin(self, request: Request) -> Trace:
        """A trace that ``follow`` fills."""
        return Trace(request=request, sent=time.perf_counter())

    async def follow(self, trace: Trace, heard: Callable[[], None] | None = None) -> None:
        """Send the request and read its answer to the end; ``heard`` is called as it comes. Raises ``AnswerError``."""
        import aiohttp

        name = trace.request.name
        body = {
            "model": self._model,
            "prompt": trace.request.prompt_ids,
            "max_tokens": trace.request.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        trace.sent = time.perf_counter()
        try:
            async with self._session.post(self._url, data=msgspec.json.encode(body)) as response:
                if response.status != 200:
                    raise AnswerError(f"{name}: status {response.status}: {(await response.text())[:MAX_ERROR_CHARS]}")
                trace.path = response.headers.get("x-kvferry-path", "")
                await self._read(trace, response, heard)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AnswerError(f"{name}: {str(error) or type(error).__name__}") from None

    async def _read(self, trace: Trace, response: "aiohttp.ClientResponse", heard: Callable[[], None] | None) -> None:
        lines = EventLines()
        finish = ""
        async for data in response.content.iter_any():
            for event in lines.feed(data):
                if event == b"[DONE]":
                    trace.finish = finish or "none"
                    check_complete(trace)
                    return
                finish = take(trace, event, time.perf_counter()) or finish
            if heard is not None:
                heard()
        raise AnswerError(f"{trace.request.name}: the answer broke off after {len(trace.events)} pieces")


def take(trace: Trace, event: bytes, now: float) -> str:
    """Note what an event brings; returns the finish reason that it names. Raises ``AnswerError``."""
    name = trace.request.name
    try:
        value = msgspec.json.decode(event, type=dict[str, Any])
    except msgspec.DecodeError:
        raise AnswerError(f"{name}: an event that is no JSON object") from None
    if "error" in value:
        raise AnswerError(f"{name}: {str(value['error'])[:MAX_ERROR_CHARS]}")
    if usage := value.get("usage"):
        trace.completion_tokens = usage["completion_tokens"]
        trace.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if usage["prompt_tokens"] != len(trace.request.prompt_ids):
            raise AnswerError(f"{name}: {usage['prompt_tokens']} prompt tokens of {len(trace.request.prompt_ids)}")
    finish = ""
    for choice in value.get("choices") or ():
        if text := choice.get("text"):
            trace.events.append(now)
            trace.text += text
        finish = choice.get("finish_reason") or finish
    return finish


def check_complete(trace: Trace) -> None:
    """Raises ``AnswerError`` unless the answer has the length that was asked for."""
    asked = trace.request.answer_tokens
    if trace.finish != "length" or trace.completion_tokens != asked:
        raise AnswerError(
            f"{trace.request.name}: {trace.completion_tokens} tokens and finish reason {trace.finish}, {asked} tokens "
            "and length were asked for"
        )
    if not trace.events:
        raise AnswerError(f"{trace.request.name}: {asked} tokens without any text")


@asynccontextmanager
async def session(key: str, silence_s: float) -> AsyncIterator["aiohttp.ClientSession"]:
    """For requests to one router; no answer may be silent for longer than ``silence_s``."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=silence_s)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as opened:
        yield opened
