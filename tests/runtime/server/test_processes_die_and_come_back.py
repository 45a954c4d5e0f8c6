"""Kill or stop a process of a pod: running answers end in an explicit error, health tells it, a new engine serves."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from kvferry_wire.frames import Alive, Begun, End, Fail, Tokens
from tests.runtime.server.harness import alive, frame_stream, frames, kill, make_leg, running_pod, until, until_seen

pytestmark = pytest.mark.processes


async def status_of(client: aiohttp.ClientSession, path: str) -> int:
    async with client.get(path) as response:
        return response.status


async def becomes(client: aiohttp.ClientSession, path: str, status: int, seconds: float) -> None:
    """Fails unless the path gives this status within so many seconds."""

    async def seen() -> bool:
        return await status_of(client, path) == status

    await until_seen(seen, seconds)


async def test_kill_9_of_the_engine(tmp_path: Path) -> None:
    """Streams of both kinds end in an explicit error at once; the API server goes on with a new incarnation."""
    with running_pod(tmp_path, model="toy:step_ms=20") as pod:
        before, server_pid = pod.ready(), pod.pid
        async with pod.client() as client:
            stream = frame_stream(client, "generate", make_leg("a", sampling={"max_tokens": 1000}))
            assert isinstance(await anext(stream), (Begun, Tokens))
            body = {"model": "toy", "prompt": "hello", "max_tokens": 1000, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                await response.content.readline()
                kill(pod.engine_pid, signal.SIGKILL)
                async with asyncio.timeout(1.0):
                    rest = ""
                    with pytest.raises(aiohttp.ClientPayloadError):  # cut after the error, no clean end
                        while line := await response.content.readline():
                            rest += line.decode()
                    last = [frame async for frame in stream][-1]
            assert isinstance(last, Fail)
            assert last.kind == "internal"
            assert '"error"' in rest
            assert "[DONE]" not in rest
            assert await status_of(client, "/readyz") == 503
            assert await status_of(client, "/healthz") == 200
            (refused,) = await frames(client, "generate", make_leg("b"))
            assert isinstance(refused, Fail)
            assert refused.kind == "draining"  # no pod is full: to the client, 503 and not 429
            await becomes(client, "/readyz", 200, 30)
            after = pod.ready()
            assert after["incarnation"] != before["incarnation"]
            assert [after[name] for name in ("http", "control", "data", "state")] == [
                before[name] for name in ("http", "control", "data", "state")
            ]
            assert isinstance((await frames(client, "generate", make_leg("c")))[-1], End)
        assert pod.pid == server_pid
        assert psutil.Process(server_pid).is_running()


async def test_a_stopped_engine_is_not_ready_then_not_live_then_replaced(tmp_path: Path) -> None:
    """SIGSTOP: no ``Alive`` any more, /readyz and /healthz are 503 within 10 s, and a new engine comes by itself."""
    with running_pod(tmp_path, model="toy:step_ms=20") as pod:
        first = pod.engine_pid
        async with pod.client() as client:
            stream = frame_stream(client, "generate", make_leg("a", sampling={"max_tokens": 4000}))
            await anext(stream)
            kill(first, signal.SIGSTOP)
            await becomes(client, "/readyz", 503, 7)
            await becomes(client, "/healthz", 503, 10)
            async with asyncio.timeout(20):
                late = [frame async for frame in stream]
            assert sum(isinstance(frame, Alive) for frame in late) <= 1
            assert isinstance(late[-1], Fail)
            await becomes(client, "/readyz", 200, 40)
            assert await status_of(client, "/healthz") == 200
            assert isinstance((await frames(client, "generate", make_leg("b")))[-1], End)
        assert not alive(first)


async def test_a_slow_engine_is_live_and_can_be_drained(tmp_path: Path) -> None:
    """Steps of 1.5 s keep the pod live and ready; ``drain`` refuses new legs and lets the running one end well."""
    with running_pod(tmp_path, model="toy:step_ms=1500") as pod:
        async with pod.client() as client:
            work = asyncio.create_task(frames(client, "generate", make_leg("a", sampling={"max_tokens": 4})))
            for _ in range(30):
                assert await status_of(client, "/healthz") == 200
                assert await status_of(client, "/readyz") == 200
                await asyncio.sleep(0.1)
            async with client.post("/internal/v1/drain") as response:
                assert response.status == 204
            assert await status_of(client, "/readyz") == 503
            for kind in ("generate", "prefill"):
                (refused,) = await frames(client, kind, make_leg(f"late-{kind}"))
                assert isinstance(refused, Fail)
                assert refused.kind == "draining"
            assert isinstance((await work)[-1], End)
            assert await status_of(client, "/healthz") == 200


def test_kill_9_of_the_server_leaves_no_process(tmp_path: Path) -> None:
    """The EngineCore goes with the API server, even one that is stopped and can notice nothing."""
    with running_pod(tmp_path) as pod:
        engine_pid = pod.engine_pid
        kill(engine_pid, signal.SIGSTOP)
        kill(pod.pid, signal.SIGKILL)
        pod.process.wait(15)
        until(lambda: not alive(engine_pid), 5)


def exits_with(tmp_path: Path, *flags: str) -> tuple[int, str]:

    done = subprocess.run(
        [sys.executable, "-m", "kvferry_runtime.server", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    return done.returncode, done.stderr


REFUSALS: list[tuple[tuple[str, ...], str]] = [
    (("--model", "/nowhere"), "/nowhere"),
    (("--model", "toy", "--port", "0", "--kv-memory", "10"), "--kv-memory"),
    (("--model", "toy", "--port", "0", "--keys-dir", "/nowhere"), "/nowhere"),
]


@pytest.mark.parametrize(("flags", "named"), REFUSALS, ids=[named for _, named in REFUSALS])
def test_what_cannot_start_exits_2_and_says_why(tmp_path: Path, flags: tuple[str, ...], named: str) -> None:
    """A wrong configuration ends the process with the flag or path in the message, whichever process found it."""
    status, text = exits_with(tmp_path, *flags)
    assert status == 2
    assert named in text
