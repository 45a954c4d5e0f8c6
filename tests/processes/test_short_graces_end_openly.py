"""A pod whose grace is shorter than its answers: they go on elsewhere, or end in an explicit error; never falsely."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvferry_router.__main__ import serve
from kvferry_router.config import parse_config
from kvferry_service.key_files import create_keys
from kvferry_service.run import StopSignal
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.processes.asking import NAME, Ask, ask_for, judge
from tests.processes.streams import LONG, Stream
from tests.runtime.server.harness import PodProcess, running_pod
from tests.support.router_process import write_pods
from tests.support.service import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

TOKENS = 500  # 5 s and more
GRACE_S = 0.5


@contextmanager
def running_pods(folder: Path, count: int, grace_s: float) -> Iterator[list[PodProcess]]:
    """Pods of both roles, of one service, that nobody starts again."""
    keys = folder / "keys"
    create_keys(keys)
    flags = ("--drain", str(grace_s), "--kv-blocks", "600", "--max-model-len", "2048")
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_pod(folder / f"b{n}", *flags, model="toy:step_ms=10", keys=keys))
            for n in range(count)
        ]


@asynccontextmanager
async def router_of(folder: Path, pods: list[PodProcess]) -> AsyncIterator[str]:
    """A router over these pods that looks for another one for a second only."""
    ready = [pod.ready() for pod in pods]
    entries = [
        {"name": f"b{n}", "role": "both", "host": "127.0.0.1", "http": found["http"], "state": found["state"]}
        for n, found in enumerate(ready)
    ]
    write_pods(folder, entries)
    config = parse_config(
        [
            *("--service-name", "short", "--model-name", NAME, "--pods-file", str(folder / "pods.json")),
            *("--keys-dir", str(folder / "keys"), "--port", "0", "--auth", "none"),
            *("--ready-file", str(folder / "router.json")),
        ]
    )
    stop = StopSignal()
    limits = msgspec.structs.replace(DEFAULT_LIMITS, resume_wait_s=1.0)
    router = asyncio.create_task(serve(config, stop, limits))
    try:
        url = await _uses(folder / "router.json", len(pods))
        yield url
    finally:
        stop.set("test over")
        await router


async def _uses(ready: Path, pods: int) -> str:
    """The router's URL, once it uses so many pods."""

    def url() -> str:
        return f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"

    async def listens() -> str:
        return "" if await asyncio.to_thread(ready.exists) else "it does not listen"

    async def why_not() -> str:
        async with aiohttp.ClientSession() as session, session.get(url() + "/metrics") as response:
            lines = (await response.text()).splitlines()
        used = [line for line in lines if line.startswith("kvferry:router_pods{") and 'state="ready"' in line]
        found = sum(float(line.rpartition(" ")[2]) for line in used)
        return "" if found == pods else f"it uses {found:g} pods"

    await until(listens, 20)
    await until(why_not, 20)
    return url()


async def test_an_answer_that_cannot_be_moved_ends_in_an_error(tmp_path: Path) -> None:
    """The only pod ends: when its grace is over, its answers are exact prefixes with an error; its exit status is 0.

    Streamed or not, nothing is ended cleanly, and nothing hangs.
    """
    asks = [Ask(f"nowhere {number}.{LONG}", TOKENS, stream=number % 2 == 0) for number in range(4)]
    with running_pods(tmp_path, 1, GRACE_S) as pods:
        async with (
            router_of(tmp_path, pods) as url,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client,
        ):
            tasks = [asyncio.create_task(ask_for(client, url, ask)) for ask in asks]
            await _legs(pods[0], len(asks))
            await asyncio.sleep(0.3)
            pods[0].process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(pods[0].process.wait, GRACE_S + 5.0) == 0
            answers = [await task for task in tasks]
        for ask, answer in zip(asks, answers, strict=True):
            judge(ask, answer)
            assert not answer.ok
            assert answer.error is not None
            assert answer.status == (200 if ask.stream else 503)
            assert bool(answer.texts[0]) == ask.stream


@pytest.mark.parametrize("grace_s", [0.0, 0.2])
async def test_a_grace_too_short_for_the_move_costs_no_answer(tmp_path: Path, grace_s: float) -> None:
    """Another pod is there: with or without their KV, all answers go on there, and the pod that ends does so with 0."""
    with running_pods(tmp_path, 2, grace_s) as pods:
        async with (
            router_of(tmp_path, pods) as url,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client,
        ):
            streams = [Stream(Ask(f"short {number}.{LONG}", TOKENS)) for number in range(6)]
            tasks = [asyncio.create_task(stream.read(client, url)) for stream in streams]

            async def begun() -> str:
                return "" if all(stream.text for stream in streams) else "not every stream has begun"

            await until(begun, 20)
            legs = await _legs(pods[0], 1)
            pods[0].process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(pods[0].process.wait, grace_s + 5.0) == 0
            for task in tasks:
                await task
        told = [comment for stream in streams for comment in stream.comments]
        assert len(told) >= legs
        assert all(comment.startswith(": kvferry resumed: ") for comment in told)


async def _legs(pod: PodProcess, least: int) -> int:
    """How many legs the pod has, once it has so many."""
    found = 0

    async def why_not() -> str:
        nonlocal found
        async with pod.client() as client, client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        found = int(next(float(line.split()[1]) for line in lines if line.startswith("kvferry:legs ")))
        return "" if found >= least else f"{found} legs"

    await until(why_not, 20)
    return found
