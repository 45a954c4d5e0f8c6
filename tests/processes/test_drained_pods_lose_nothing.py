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


async def read_all(
    service: Service, client: aiohttp.ClientSession, found: list[Stream]
) -> list["asyncio.Task[Stream]"]:
    """Begin them all, and wait until each has text."""
    tasks = [asyncio.create_task(stream.read(client, service.url())) for stream in found]

    async def why_not() -> str:
        for task in tasks:
            if task.done():
                task.result()
        return "" if all(stream.text for stream in found) else "not every stream has begun"

    await until(why_not, 30)
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
        try:
            return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.pid} runs"
        except psutil.NoSuchProcess:
            return ""

    await until(why_not, seconds)


async def busiest(service: Service) -> Pod:
    counts = {name: (await legs_of(service, name))[0] for name in ("decode-0", "decode-1")}
    return cast(Pod, max(counts, key=lambda name: counts[name]))


async def test_streams_of_a_decode_pod_move_with_their_kv(service: Service, client: aiohttp.ClientSession) -> None:
    """Eight streams: none fails, every token is the oracle's, each that moved says so and was pulled, not computed."""
    found = streams(8, "moved")
    before = {pod: await counted(service, pod, "kv_pulls_ok_total") for pod in DECODE}
    tasks = await read_all(service, client, found)
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


async def test_prefill_under_load_fails_no_request(service: Service) -> None:
    """Streams come one after the other while a prefill pod ends and comes back: all whole, all tokens right."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:

        async def ask(client: int) -> None:
            for number in range(6):
                (stream,) = streams(1, f"load {client} {number}", tokens=20)
                await stream.read(session, service.url())

        tasks = [asyncio.create_task(ask(client)) for client in range(6)]
        process = psutil.Process(service.signal("prefill-0", "server", signal.SIGTERM))
        await gone(process, 12)
        for task in tasks:
            await task
    assert "Traceback" not in service.log("prefill-0")


async def test_source_killed_in_a_move_costs_no_token(service: Service, client: aiohttp.ClientSession) -> None:
    """The pod is asked to drain and killed in the same moment: what was not pulled is computed again, exactly."""
    found = streams(6, "killed")
    tasks = await read_all(service, client, found)
    pod = await busiest(service)
    engine = service.pid(pod, "engine")
    assert engine is not None
    async with service.session() as session, session.post(service.url(pod) + "/internal/v1/drain") as response:
        assert response.status == 204
    await asyncio.sleep(0.1)  # the router hears of it, and asks
    service.signal(pod, "server", signal.SIGKILL)
    for task in tasks:
        await task
    told = [comment for stream in found for comment in stream.comments if "resumed" in comment]
    assert told


async def test_drain_shows_and_the_router_takes_the_streams(service: Service, client: aiohttp.ClientSession) -> None:
    """`POST /internal/v1/drain` alone: the pod stays, tells that it drains, empties, and takes nothing new."""
    found = streams(4, "shown")
    tasks = await read_all(service, client, found)
    pod = await busiest(service)
    async with service.session() as session:
        async with session.post(service.url(pod) + "/internal/v1/drain") as response:
            assert response.status == 204

        async def why_not() -> str:
            info = await service.info(session, pod)
            assert info.draining
            return f"{info.legs} legs and {info.leases} leases" if info.legs or info.leases else ""

        await until(why_not, 3)
        metrics = await service.metrics(session, pod)
        assert metrics["draining"] == 1
        assert metrics["legs_moved_total"] >= 1
        assert not any(task.done() for task in tasks)
        for task in [*tasks, *await read_all(service, client, streams(3, "late", 20))]:
            await task
        assert (await service.info(session, pod)).legs == 0
    service.signal(pod, "server", signal.SIGTERM)  # the next life takes legs again


ALONE = SPEC | {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


@pytest.fixture(scope="module")
def lone_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("alone"), ALONE) as service:
        yield service


async def test_streams_of_the_only_decode_pod_end_there(lone_pair: Service, client: aiohttp.ClientSession) -> None:
    """Nobody could go on: they end well within the grace, and nothing of them is moved or lost."""
    async with lone_pair.session() as session:
        await lone_pair.wait_ready(session)
    found = streams(4, "alone", tokens=80)
    tasks = await read_all(lone_pair, client, found)
    process = psutil.Process(lone_pair.signal("decode-0", "server", signal.SIGTERM))
    for task in tasks:
        await task
    assert [stream.comments for stream in found] == [[]] * 4
    await gone(process, 12)
    assert "grace to drain is over" not in lone_pair.log("decode-0")


async def test_a_second_signal_ends_a_drain_at_once(lone_pair: Service, client: aiohttp.ClientSession) -> None:
    """Nobody waits for the grace who does not want to; the answer goes on at the pod's next life."""
    async with lone_pair.session() as session:
        await lone_pair.wait_ready(session)
    found = streams(1, "twice", tokens=300)
    tasks = await read_all(lone_pair, client, found)
    process = psutil.Process(lone_pair.signal("decode-0", "server", signal.SIGTERM))
    await asyncio.sleep(0.3)
    assert process.is_running()
    process.send_signal(signal.SIGTERM)
    await gone(process, 2)
    await tasks[0]
    assert found[0].comments == [": kvferry resumed: dead"]
