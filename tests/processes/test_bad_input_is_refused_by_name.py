"""Whatever is sent, through the router or straight to a pod: 4xx in OpenAI's shape that names the field, at once."""

import asyncio
import io
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.processes.asking import NAME, Ask, ask_for, judge
from tests.processes.bad_input import BAD_INPUT, CHAT, TEXT, BadInput
from tests.support.service import ENGINE_PODS, Pod, Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

AT_ONCE_S = 1.0
# What an error may not tell a client: addresses of memory, places of files, our own sources.
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|\.py\b|/(home|root|usr|opt|tmp|dev|var|proc|run)/|kvferry_\w+")
TARGETS = pytest.mark.parametrize("target", ["router", "decode-0"])


@pytest.fixture(autouse=True)
async def _same_life(service: Service, internal: aiohttp.ClientSession) -> AsyncIterator[None]:
    """No bad input ends a process, or an engine's life."""
    pids = service.pids()
    lives = [(await service.info(internal, name)).incarnation for name in ENGINE_PODS]
    yield
    assert service.pids() == pids
    assert [(await service.info(internal, name)).incarnation for name in ENGINE_PODS] == lives
    ask = Ask("After bad input, good input. " * 3)
    async with aiohttp.ClientSession() as session:
        answer = await ask_for(session, service.url(), ask)
    assert answer.ok
    judge(ask, answer)
    await service.wait_idle(internal, 2.0)


def check_error(bad: BadInput, status: int, document: Any) -> None:
    told = f"{bad.name}: {status} {str(document)[:500]}"
    assert status == bad.status, told
    assert set(document) == {"error"}, told
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}, told
    assert error["message"], told
    assert error["type"], told
    assert len(error["message"]) < 3000, told
    assert (error["param"] or "").startswith(bad.param), told
    assert bool(error["param"]) == bool(bad.param), told
    assert not LEAK.search(error["message"]), told


@TARGETS
async def test_each_is_4xx_with_the_field(service: Service, internal: aiohttp.ClientSession, target: Pod) -> None:
    """The whole table, one after the other, each within a second."""
    assert len(BAD_INPUT) >= 60
    assert len({bad.name for bad in BAD_INPUT}) == len(BAD_INPUT)
    slow, faults = [], []
    for bad in BAD_INPUT:
        begun = time.monotonic()
        async with internal.post(service.url(target) + bad.path, data=_steady(bad.body)) as response:
            document = await response.json()
        if time.monotonic() - begun > AT_ONCE_S:
            slow.append((bad.name, time.monotonic() - begun))
        try:
            check_error(bad, response.status, document)
        except AssertionError as error:
            faults.append(str(error).splitlines()[0])
    assert not faults, "\n".join(faults)
    assert not slow


def _steady(body: bytes) -> Any:
    """A body that aiohttp sends without a warning about its size."""
    return aiohttp.payload.BytesIOPayload(io.BytesIO(body))


@TARGETS
async def test_all_at_once(service: Service, internal: aiohttp.ClientSession, target: Pod) -> None:
    """The table in parallel, beside good requests that are answered as ever."""

    async def bad(item: BadInput) -> None:
        async with internal.post(service.url(target) + item.path, data=_steady(item.body)) as response:
            check_error(item, response.status, await response.json())

    async def good(number: int) -> None:
        ask = Ask(f"{number} among bad ones. " * 4, stream=number % 2 == 0)
        async with aiohttp.ClientSession(headers=internal.headers) as session:
            answer = await ask_for(session, service.url(target), ask)
        assert answer.ok, answer
        judge(ask, answer)

    await asyncio.gather(*(bad(item) for item in BAD_INPUT), *(good(number) for number in range(4)))


@TARGETS
@pytest.mark.parametrize(("character", "count"), [("a", 5_000_000), (" ", 5_000_000), ("a", 999_000), (" ", 999_000)])
async def test_a_huge_message_delays_no_stream(
    service: Service, internal: aiohttp.ClientSession, target: Pod, character: str, count: int
) -> None:
    """B175: while it is refused, no other stream has a gap of a second."""
    loop = asyncio.get_running_loop()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def stream() -> float:
        worst, last = 0.0, loop.time()
        body = {"model": NAME, "prompt": "go", "max_tokens": 1500, "stream": True}
        async with internal.post(service.url(target) + TEXT, json=body) as response:
            async for _ in response.content.iter_any():
                worst, last = max(worst, loop.time() - last), loop.time()
                begun.set()
                if ended.is_set():
                    break
        return worst

    streaming = asyncio.create_task(stream())
    async with asyncio.timeout(10):
        await begun.wait()
    body = b'{"model": "toy", "messages": [{"role": "user", "content": "' + character.encode() * count + b'"}]}'
    async with internal.post(service.url(target) + CHAT, data=_steady(body)) as response:
        error = (await response.json())["error"]
    ended.set()
    assert response.status == (413 if len(body) > 4 * 2**20 else 400), error
    assert await streaming < 1.0


def _http(line: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([line + " HTTP/1.1", "Host: x", *headers, "", ""]).encode() + body


# What is sent, and the statuses that are right. A sender that is still sending may find the connection closed instead.
HUGE: dict[str, bytes] = {
    "10000 headers": _http("GET /v1/models", *["X-A: b"] * 10_000),
    "a header of 10 MB": _http("GET /v1/models", "X-A: " + "b" * 10 * 2**20),
    "a path of 10 MB": _http("GET /" + "v" * 10 * 2**20),
}
BROKEN: dict[str, tuple[bytes, int]] = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
    "no HTTP": (b"hello there\r\n\r\n", 400),
    "two lengths": (_http("POST " + TEXT, "Content-Length: 5", "Content-Length: 6", body=b"hello!"), 400),
    "a negative length": (_http("POST " + TEXT, "Content-Length: -5"), 400),
    "length and chunks": (
        _http("POST " + TEXT, "Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        400,
    ),
    "a bad chunk": (_http("POST " + TEXT, "Transfer-Encoding: chunked", body=b"ZZ\r\n"), 400),
    "a compressed body": (_http("POST " + TEXT, "Content-Encoding: gzip", "Content-Length: 1", body=b"x"), 415),
    "another method": (_http("DELETE /v1/models"), 405),
    "another route": (_http("GET /v1/embeddings"), 404),
    "a route of the pods": (_http("POST /internal/v1/generate", "Content-Length: 0"), 404),
}


async def _exchange(url: str, sent: bytes) -> tuple[int, bytes]:
    """Status and body of the answer; 0 when the connection was closed while we sent."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(5):
            try:
                writer.write(sent)
                await writer.drain()
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"\r\nContent-Length: (\d+)\r\n", head)
                assert length is not None, head
                return int(head.split(b" ")[1]), await reader.readexactly(int(length[1]))
            except (ConnectionError, asyncio.IncompleteReadError):
                return 0, b""
    finally:
        writer.transport.abort()


@TARGETS
async def test_endless_headers_are_cut_off(service: Service, target: Pod) -> None:
    """B174: 4xx, or a closed connection for who goes on sending."""
    for name, sent in HUGE.items():
        status, _ = await _exchange(service.url(target), sent)
        assert status in (0, 400, 414, 431), name


async def test_broken_http_is_refused(service: Service) -> None:
    """Each gets a 4xx in OpenAI's shape."""
    for name, (sent, expected) in BROKEN.items():
        status, body = await _exchange(service.url(), sent)
        assert status == expected, name
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, name


async def test_what_would_be_right_elsewhere_is_right_here(service: Service, client: aiohttp.ClientSession) -> None:
    """Values at the edge of what is accepted are accepted."""
    good: tuple[dict[str, Any], ...] = (
        {"prompt": [0]},
        {"prompt": [511]},
        {"prompt": ["hi"]},
        {"prompt": "x" * 2047, "max_tokens": 1},
        {"n": 8, "max_tokens": 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"temperature": 2, "top_p": 1e-9},
        {"top_k": -1},
        {"stop": []},
        {"stop": None},
        {"stop": ["x" * 256] * 16},
        {"logprobs": None, "echo": False, "suffix": None, "logit_bias": {}, "frequency_penalty": 0, "user": "u"},
    )
    for fields in good:
        body = {"model": NAME, "prompt": "hi", "max_tokens": 2} | fields
        async with client.post(service.url() + TEXT, json=body) as response:
            assert response.status == 200, (fields, await response.text())
