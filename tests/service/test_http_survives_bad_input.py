"""Malformed, oversized and slow requests end in a clear refusal and disturb nobody."""

import asyncio
import json

import pytest

from kvferry_service.errors import HttpError, translator
from tests.service.support import TOKEN, error, make_limits, parse, raw, request, serving


async def test_a_body_over_the_cap_is_413_with_and_without_a_length() -> None:
    """The cap holds for a declared length and for a chunked body that only turns out too long."""
    async with serving() as (port, _, _app):
        assert error(await raw(port, request("POST", "/echo", body=b"x" * 1001)))[0] == 413
        chunked = request("POST", "/echo", "Transfer-Encoding: chunked") + b"".join(
            b"64\r\n" + b"x" * 100 + b"\r\n" for _ in range(20)
        )
        assert error(await raw(port, chunked + b"0\r\n\r\n"))[0] == 413
        assert parse(await raw(port, request("POST", "/echo", body=b"x" * 1000)))[2] == b"x" * 1000


async def test_a_body_that_does_not_come_is_408() -> None:
    """A promised body is waited for no longer than the limit."""
    async with serving() as (port, _, _app):
        head = request("POST", "/echo", "Content-Length: 10")
        assert error(await raw(port, head + b"x"))[0] == 408


@pytest.mark.parametrize(
    ("sent", "accepted"),
    [
        (request("GET", "/healthz", "X-Big: " + "y" * 5000), {431, 400}),
        (request("GET", "/healthz", *[f"X-{i}: y" for i in range(500)]), {431, 400}),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n", {400}),
        (request("POST", "/echo", "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n", {400}),
        (request("POST", "/echo", "Content-Length: 5", "Content-Length: 6") + b"xxxxxx", {400}),
        (request("POST", "/echo", "Content-Encoding: gzip", body=b"x"), {415}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {400}),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n", {400}),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", {400}),
    ],
    ids=["long", "many", "two-hosts", "cl-te", "two-cl", "gzip", "tls", "space", "nul"],
)
async def test_bad_requests_are_refused_in_openai_shape(sent: bytes, accepted: set[int]) -> None:
    """What is not one clear HTTP request gets a 4xx, and the server goes on."""
    async with serving() as (port, _, _app):
        answer = await raw(port, sent)
        assert error(answer)[0] in accepted
        assert "aiohttp" not in parse(answer)[1].get("server", "").lower()
        assert parse(await raw(port, request("GET", "/healthz")))[0] == 200


async def test_slow_headers_are_cut_and_others_are_served_meanwhile() -> None:
    """Connections that never finish their headers are closed at the deadline; others are served all the time."""
    async with serving() as (port, _, _app):
        slow = [asyncio.create_task(raw(port, b"GET /healthz HTTP/1.1\r\nHost: ")) for _ in range(50)]
        assert parse(await raw(port, request("GET", "/healthz")))[0] == 200
        assert all(answer == b"" for answer in await asyncio.gather(*slow))


async def test_slow_headers_of_a_second_request_are_cut_too() -> None:
    """An idle kept-alive connection stays, one that began a request and stopped does not."""
    async with serving() as (port, _, _app):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}")
        await asyncio.sleep(0.5)
        assert not reader.at_eof()
        writer.write(b"GET /healthz HT")
        async with asyncio.timeout(2):
            assert await reader.read() == b""
        writer.close()


async def test_connections_are_capped() -> None:
    """One more connection than the cap is closed at once; when one leaves, a new one is served."""
    async with serving(make_limits(connections=3, header_timeout_s=5.0)) as (port, _, _app):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await raw(port, request("GET", "/healthz")) == b""  # connections are taken in their order
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(5.0):
            while not (answer := await raw(port, request("GET", "/healthz"))):
                pass
        assert parse(answer)[0] == 200


async def test_a_failure_of_ours_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """500 holds no detail of the exception; the log holds the traceback."""
    async with serving() as (port, _, _app):
        answer = await raw(port, request("GET", "/fail"))
        assert error(answer)[0] == 500
        assert b"secret" not in answer
        assert "/secret/path" in caplog.text


async def test_an_answer_that_breaks_off_is_a_cut_connection() -> None:
    """An error after the first byte never looks like a whole answer."""
    async with serving() as (port, _, _app):
        answer = await raw(port, request("GET", "/broken"))
        assert not answer.endswith(b"0\r\n\r\n")


async def test_an_error_of_a_layer_above_becomes_its_answer() -> None:
    """``translate`` maps foreign exceptions, with Retry-After."""

    def translate(found: Exception) -> HttpError | None:
        return HttpError(429, "later", retry_after_s=7) if isinstance(found, KeyError) else None

    async with serving(translate=translate) as (port, _, _app):
        answer = await raw(port, request("GET", "/fail"))
        assert error(answer)[0] == 429
        assert parse(answer)[1]["retry-after"] == "7"


class Refusal(Exception):
    """An exception of a layer that the service layer does not know."""

    def __init__(self) -> None:
        self.status, self.message, self.type = 422, "too odd", "odd_error"
        self.param, self.code, self.retry_after = "field", "odd", 3


def test_one_kind_of_exceptions_becomes_answers_with_all_that_they_say() -> None:
    """Subclasses too; another kind is left alone, however alike it looks."""

    class Alike(Exception):
        status, message, type, param, code, retry_after = 400, "m", "t", None, None, None

    class Special(Refusal):
        pass

    translate = translator(Refusal)
    for refusal in (Refusal(), Special()):
        made = translate(refusal)
        assert made is not None
        told = json.loads(made.body())["error"]
        assert told == {"message": "too odd", "type": "odd_error", "param": "field", "code": "odd"}
        assert (made.status, made.retry_after_s) == (422, 3)
    assert translate(Alike()) is None
    assert translate(KeyError()) is None


async def test_a_client_that_leaves_cancels_its_handler() -> None:
    """Closing the connection cancels the handler at once."""
    async with serving() as (port, notes, _app):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("GET", "/hang", token=TOKEN))
        await notes.started.wait()
        writer.close()
        async with asyncio.timeout(1):
            await notes.cancelled.wait()


@pytest.mark.parametrize("given", ["abc-1", "x" * 128])
async def test_a_fit_request_id_is_echoed(given: str) -> None:
    """The client's own id comes back unchanged, on errors too."""
    async with serving() as (port, _, _app):
        for path in ("/healthz", "/nope"):
            answer = await raw(port, request("GET", path, f"x-request-id: {given}"))
            assert parse(answer)[1]["x-request-id"] == given


@pytest.mark.parametrize("given", ["x" * 129, "a b", "ünï", ""])
async def test_an_unfit_request_id_is_replaced(given: str) -> None:
    """Too long, blank or non-printable ids are not echoed; a fresh one is."""
    async with serving() as (port, _, _app):
        answer = await raw(port, request("GET", "/healthz", f"x-request-id: {given}"))
        assert parse(answer)[1]["x-request-id"].startswith("req-")


@pytest.mark.parametrize("close_s", [0.3, 0.6])
async def test_a_close_takes_no_longer_than_it_says(close_s: float) -> None:
    """A handler that does not end gets the whole time once, and is cut then."""
    loop = asyncio.get_running_loop()
    async with serving(close_s=close_s) as (port, notes, _app):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("GET", "/hang", token=TOKEN))
        await notes.started.wait()
        begun = loop.time()
    assert close_s * 0.9 <= loop.time() - begun < close_s * 1.5
    async with asyncio.timeout(1):
        await notes.cancelled.wait()
    writer.close()
