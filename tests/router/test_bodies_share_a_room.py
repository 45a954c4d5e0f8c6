"""The bodies of all requests together have a cap, which is asked before a body is read, over real connections."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from .harness import LIMITS, Router, running, until
from .scripted_pod import Script, ScriptedPod

BODY_BYTES = 4000
ROOM = msgspec.structs.replace(LIMITS, body_bytes=BODY_BYTES, bodies_bytes=2 * BODY_BYTES, body_timeout_s=1.0)
PROMPT = "the marker of this request"


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Router]:
    p, d = ScriptedPod("p1", "prefill"), ScriptedPod("d1", "decode")
    d.default["decode"] = Script()
    async with running(tmp_path, p, d, limits=ROOM) as router:
        yield router


async def begin(router: Router, header: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The head of a request whose body does not follow."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
    return reader, writer


@pytest.mark.parametrize(
    "header", [f"Content-Length: {BODY_BYTES}", "Transfer-Encoding: chunked"], ids=["of a length", "of no length"]
)
async def test_bodies_on_their_way_leave_no_room_for_another(router: Router, header: str) -> None:
    """Two whose senders dawdle take all of it: the third is 429 with Retry-After at once, and is not read.

    A body of no stated length counts as the longest. Once they are given up, a request is served again.
    """
    held = [await begin(router, header) for _ in range(2)]

    async def no_room() -> bool:
        async with router.complete(PROMPT) as response:
            return response.status == 429

    await until(no_room, 1.0)
    loop = asyncio.get_running_loop()
    asked_at = loop.time()
    async with router.complete(PROMPT) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
    assert loop.time() - asked_at < 0.5
    for reader, writer in held:
        async with asyncio.timeout(5.0):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()

    async def served() -> bool:
        async with router.complete(PROMPT) as response:
            return response.status == 200 and (await response.json())["choices"][0]["text"] == PROMPT

    await until(served, 2.0)


async def test_a_body_takes_what_it_has_once_it_is_there(router: Router) -> None:
    """Twenty small requests at a time fit where two of the longest would, and nothing of them stays."""
    body = json.dumps({"model": "toy", "prompt": PROMPT, "max_tokens": len(PROMPT)})
    assert len(body) * 20 < 2 * BODY_BYTES

    async def ask() -> int:
        async with router.complete(PROMPT) as response:
            await response.read()
            return int(response.status)

    for _ in range(3):
        assert set(await asyncio.gather(*(ask() for _ in range(20)))) == {200}


async def test_a_client_that_leaves_gives_its_room_back(router: Router) -> None:
    """Half a body, and the connection is closed: again and again, and there is still room."""
    for _ in range(10):
        _, writer = await begin(router, f"Content-Length: {BODY_BYTES}")
        writer.write(b"{")
        await writer.drain()
        writer.close()

    async def served() -> bool:
        async with router.complete(PROMPT) as response:
            return bool(response.status == 200)

    await until(served, 2.0)
