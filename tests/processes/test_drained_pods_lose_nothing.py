"""SIGTERM on a pod under load: running answers move with their KV, leases are waited for, and no request fails."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import aiohttp
import psutil
import pytest

from tests.processes.asking import NAME, Ask, said
from tests.support.service import Pod, Service, running_service, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SPEC: dict[str, Any] = {
    "model": {"name": NAME, "source": "toy:step_ms=10"},
    "engine": {"kvBlocks": 600, "blockSize": 16, "maxModelLen": 2048, "tokenBudget": 64, "threads": 1},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 2},
    "router": {"auth": "none", "requestDeadline": "60s", "disaggregation": {"minUncachedTokens": 32}},
}
PODS = cast("tuple[Pod, ...]", ("prefill-0", "prefill-1", "decode-0", "decode-1"))
DECODE = cast("tuple[Pod, ...]", ("decode-0", "decode-1"))
TOKENS = 400  # of an answer: 4 s and more, so that a drain comes in the middle of it


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("drain"), SPEC) as service:
        yield service


@pytest.fixture
async def service(pool: Service) -> AsyncIterator[Service]:
    """All four pods up and used by the router."""
    async with pool.session() as session:
        await until(lambda: why_not_all(pool, session), 60)
    yield pool


async def why_not_all(service: Service, session: aiohttp.ClientSession) -> str:
    if service.record().state != "ready":
        return f"state {service.record().state}"
    try:
        ready = [
            value
            for series, value in (await service.metrics(session)).items()
            if series.startswith("router_pods{") and '"ready"' in series
        ]
    except (aiohttp.ClientError, TimeoutError) as error:
        return repr(error)
    return "" if sum(ready) == len(PODS) else f"the router uses {sum(ready):g} pods"


class Stream:
    """One streamed answer: what came, and the comments in it."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.text = ""
        self.comments: list[str] = []
        self.done = False

    async def read(self, session: aiohttp.ClientSession, url: str) -> "Stream":
        async with session.post(url + "/v1/completions", json=self.ask.body()) as response:
            assert response.status == 200, await response.text()
            async for raw in response.content:
                line = raw.decode().rstrip("\n")
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    document = json.loads(line.removeprefix("data: "))
                    assert "error" not in document, document
                    self.text += "".join(choice["text"] for choice in document["choices"])
                elif line.startswith(":"):
                    self.comments.append(line)
        assert self.done
        assert self.text == said(self.ask.prompt, self.ask.max_tokens)
        return self


def streams(count: int, mark: str, tokens: int = TOKENS) -> list[Stream]:
    return [
        Stream(Ask(f"{mark} {number}: a prompt that is long enough to be ferried.", tokens)) for number in range(count)
    ]


async def read_all(service: Service, found: list[Stream]) -> list["asyncio.Task[Stream]"]:
    """Begin them all, and wait until each has text."""
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90))
    tasks = [asyncio.create_task(stream.read(session, service.url())) for stream in found]

    async def why_not() -> str:
        for task in tasks:
            if task.done():
                task.result()
        return "" if all(stream.text for stream in found) else "not every stream has begun"

    await until(why_not, 30)
    asyncio.gather(*tasks, return_exceptions=True).add_done_callback(lambda _: asyncio.ensure_future(session.close()))
    return tasks


async def legs_of(service: Service, name: str) -> tuple[float, float]:
    """Legs at a pod, and how many have left it."""
    async with service.session() as session:
        metrics = await service.metrics(session, cast(Pod, name))
    return metrics["legs"], metrics["legs_moved_total"]


async def counted(service: Service, name: Pod, counter: str) -> float:
    """Of one pod, over all labels."""
    async with service.session() as session:
        found = await service.metrics(session, name)
    return sum(value for series, value in found.items() if series.partition("{")[0] == counter)


async def gone(process: psutil.Process, seconds: float) -> None:
    async def why_not() -> str:
        running = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return f"{process.pid} runs" if running else ""

    await until(why_not, seconds)


async def busiest(service: Service) -> Pod:
    counts = {name: (await legs_of(service, name))[0] for name in ("decode-0", "decode-1")}
    return cast(Pod, max(counts, key=lambda name: counts[name]))


async def test_streams_of_a_decode_pod_move_with_their_kv(service: Service) -> None:
    """Eight streams: none fails, every token is the oracle's, each that moved says so and was pulled, not computed."""
    found = streams(8, "moved")
    before = {pod: await counted(service, pod, "kv_pulls_ok_total") for pod in DECODE}
    tasks = await read_all(service, found)
    pod = await busiest(service)
    other = cast(Pod, "decode-1" if pod == "decode-0" else "decode-0")
    legs = (await legs_of(service, pod))[0]
    assert legs >= 1
    pid = service.signal(pod, "server", signal.SIGTERM)
    process = psutil.Process(pid)
    await gone(process, 6)
    assert not any(task.done() for task in tasks)  # it ended long before the answers did
    for task in tasks:
        await task
    moved = [stream for stream in found if stream.comments]
    assert [stream.comments for stream in moved] == [[": kvferry resumed: moved"]] * len(moved)
    assert len(moved) == legs
    # The other pod has pulled the prompts of its own legs, and all of the others.
    assert await counted(service, other, "kv_pulls_ok_total") - before[other] == len(found)
    assert await counted(service, other, "kv_recomputed_total") == 0
