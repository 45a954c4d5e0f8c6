"""SIGTERM ends running answers in an explicit error, and lets those that are about to end do so."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from kvferry_wire.frames import Begun, End, Fail, Tokens
from tests.runtime.server.harness import busy_with, frame_stream, frames, kill, make_leg, running_pod, until_seen

pytestmark = pytest.mark.processes

LONG = {"model": "toy", "prompt": "hello", "max_tokens": 1000}


async def refuses(client: aiohttp.ClientSession) -> bool:
    """Whether the pod says that it takes no new work."""
    async with client.get("/readyz") as response:
        return response.status == 503


async def test_running_answers_end_in_an_error_of_their_kind(tmp_path: Path) -> None:
    """A stream's last event is the error, a whole answer is 503, a frame stream ends with ``Fail``."""
    with running_pod(tmp_path, model="toy:step_ms=20") as pod:
        async with pod.client() as client, asyncio.timeout(20):
            leg = frame_stream(client, "generate", make_leg("a", sampling={"max_tokens": 1000}))
            assert isinstance(await anext(leg), (Begun, Tokens))
            whole = asyncio.create_task(client.post("/v1/completions", json=LONG))
            async with client.post("/v1/completions", json=LONG | {"stream": True}) as response:
                text = (await response.content.readline()).decode()
                short = asyncio.create_task(frames(client, "generate", make_leg("b", sampling={"max_tokens": 30})))
                await busy_with(client, 4)
                kill(pod.pid, signal.SIGTERM)
                await until_seen(lambda: refuses(client), 5.0)
                async with client.post("/v1/completions", json=LONG) as late:
                    assert late.status == 503
                with pytest.raises(aiohttp.ClientPayloadError):  # no clean end
                    while line := await response.content.readline():
                        text += line.decode()
            events = [line for line in text.splitlines() if line]
            assert '"error"' in events[-1]
            assert "stopping" in events[-1]
            assert "[DONE]" not in text
            async with await whole as refused:
                assert refused.status == 503
                assert "stopping" in (await refused.json())["error"]["message"]
            last = [frame async for frame in leg][-1]
            assert isinstance(last, Fail)
            assert last.kind == "draining"
            assert isinstance((await short)[-1], End)
        assert await asyncio.to_thread(pod.process.wait, 10) == 0
        assert "Traceback" not in pod.log.read_text()
