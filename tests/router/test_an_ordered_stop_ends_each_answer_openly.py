"""A router that is told to stop: what is under way may end; the rest ends in an error that says so."""

import asyncio
import json
import logging
from pathlib import Path

import aiohttp
import msgspec
import pytest

from .harness import LIMITS, Router, events, running, text_of
from .scripted_pod import Script, ScriptedPod

PROMPT = "the marker of this request"
GRACE = ("--drain", "2")


def make_pods(pause_s: float) -> tuple[ScriptedPod, ScriptedPod]:
    p, d = ScriptedPod("p1", "prefill"), ScriptedPod("d1", "decode")
    d.default["decode"] = Script(pause_s=pause_s)
    return p, d


def outcomes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["kvferry"]["outcome"] for record in caplog.records if record.message == "request"]


async def test_stream_that_outlasts_the_grace_ends_in_an_error_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exact prefix, one error event, no [DONE] and no clean end; both pods are aborted; the outcome has its name."""
    caplog.set_level(logging.INFO)
    p, d = make_pods(0.1)
    async with running(tmp_path, p, d) as router, router.complete(PROMPT, stream=True) as response:
        body = await response.content.readany()
        router.stop.set("test")
        with pytest.raises(aiohttp.ClientPayloadError):
            while part := await response.content.readany():
                body += part
        last = events(body)[-1]
        assert last["error"]["code"] == "stopping"
        assert b"[DONE]" not in body
        assert PROMPT.startswith(text_of(body))
        await d.wait_for(lambda: len(d.aborts) == 1)
        await p.wait_for(lambda: len(p.aborts) == 1)
    assert outcomes(caplog) == ["stopping"]


async def test_whole_answer_that_outlasts_the_grace_is_a_503(tmp_path: Path) -> None:
    """Never an empty reply: a status, the error's object, and when to try again."""
    p, d = make_pods(0.2)
    async with running(tmp_path, p, d) as router:
        asked = asyncio.create_task(router.complete(PROMPT).__aenter__())
        await d.wait_for(lambda: d.running == 1)
        router.stop.set("test")
        async with await asked as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert (await response.json())["error"]["code"] == "stopping"
        await d.wait_for(lambda: len(d.aborts) == 1)


async def test_answer_that_ends_within_the_grace_is_whole_and_new_requests_are_refused(tmp_path: Path) -> None:
    """Meanwhile the router is not ready, and what arrives gets a 503 at once."""
    p, d = make_pods(0.02)
    async with running(tmp_path, p, d, flags=GRACE) as router:
        async with router.complete(PROMPT, stream=True) as response:
            router.stop.set("test")
            await router.wait_ready(ready=False)
            async with router.complete(PROMPT) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
                assert (await refused.json())["error"]["code"] == "stopping"
            body = await response.read()
        assert events(body)[-1] == "[DONE]"
        assert text_of(body) == PROMPT
    assert len(d.legs) == 1
    assert d.aborts == []


@pytest.mark.parametrize("stage", ["body", "queue"])
async def test_request_that_has_not_begun_when_the_grace_is_over_is_a_503(tmp_path: Path, stage: str) -> None:
    """Half a body, or a place in the queue: the client is told."""
    p, d = make_pods(0.2)
    limits = msgspec.structs.replace(LIMITS, inflight=1, queue_wait_s=5.0)
    async with running(tmp_path, p, d, limits=limits) as router:
        first = asyncio.create_task(router.complete(PROMPT).__aenter__())
        await d.wait_for(lambda: d.running == 1)
        body = json.dumps({"model": "toy", "prompt": PROMPT, "max_tokens": 4}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        writer.write(body[:10] if stage == "body" else body)
        await asyncio.sleep(0.05)
        router.stop.set("test")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3.0)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in head
        writer.close()
        async with await first as response:
            assert response.status == 503
    assert len(d.legs) == 1


async def test_stop_with_nothing_under_way_takes_no_grace(tmp_path: Path) -> None:
    """The grace is for answers alone."""
    p, d = make_pods(0.0)
    async with asyncio.timeout(10.0):
        async with running(tmp_path, p, d, flags=("--drain", "30")) as router, router.complete(PROMPT) as response:
            assert response.status == 200
            await response.read()


async def exchange(router: Router, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that keeps alive, after one request on it, or after that of a stream with this body has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    path = "POST /v1/completions" if body else "GET /v1/models"
    writer.write(f"{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3.0)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" not in head.lower()
    return reader, writer


async def test_kept_connections_end_so_that_clients_reach_another_router(tmp_path: Path) -> None:
    """One that is idle closes at once, one with an answer under way after it; a new one after one refusal."""
    p, d = make_pods(0.02)
    body = json.dumps({"model": "toy", "prompt": PROMPT, "max_tokens": len(PROMPT), "stream": True}).encode()
    async with running(tmp_path, p, d, flags=GRACE) as router:
        idle, idle_writer = await exchange(router)
        busy, busy_writer = await exchange(router, body)
        router.stop.set("test")
        await asyncio.wait_for(idle.read(), 0.5)
        assert idle.at_eof()
        async with router.complete(PROMPT) as refused:
            assert (refused.status, refused.headers["Connection"]) == (503, "close")
        assert b"[DONE]" in await asyncio.wait_for(busy.read(), 3.0)
        assert busy.at_eof()
        for writer in (idle_writer, busy_writer):
            writer.close()
