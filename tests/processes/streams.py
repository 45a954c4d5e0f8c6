"""Long streamed answers of services with several pods of a kind: what came, and which pod is at work on them."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil

from tests.processes.asking import NAME, Ask, said
from tests.support.service import Pod, Service, until

LONG = " A prompt that is long enough to be ferried."
TOKENS = 400  # of an answer: 4 s and more, so that what happens to its pod happens in the middle of it


def pool_spec(prefill: int, decode: int, *, lease: str = "15s", deadline: str = "90s") -> dict[str, Any]:
    """A service on the toy model, 10 ms a step, with so many pods of each kind and room for all answers of a test."""
    return {
        "model": {"name": NAME, "source": "toy:step_ms=10"},
        "engine": {"kvBlocks": 600, "blockSize": 16, "maxModelLen": 2048, "tokenBudget": 64, "threads": 1},
        "prefill": {"replicas": prefill},
        "decode": {"replicas": decode},
        "router": {"auth": "none", "requestDeadline": deadline, "disaggregation": {"minUncachedTokens": 32}},
        "transfer": {"lease": lease},
    }


class Stream:
    """One streamed answer: what came, and the comments in it."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.text = ""
        self.comments: list[str] = []
        self.times: list[float] = []  # of its events, seconds
        self.done = False

    @property
    def gap_s(self) -> float:
        """The longest time for which it stood still."""
        return max(after - before for before, after in itertools.pairwise(self.times))

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
                    self.times.append(time.monotonic())
                    self.text += "".join(choice["text"] for choice in document["choices"])
                elif line.startswith(":"):
                    self.comments.append(line)
        assert self.done
        assert self.text == said(self.ask.prompt, self.ask.max_tokens)
        return self


def make_streams(count: int, mark: str, tokens: int = TOKENS) -> list[Stream]:
    return [Stream(Ask(f"{mark} {number}.{LONG}", tokens)) for number in range(count)]


@asynccontextmanager
async def rested(pool: Service) -> AsyncIterator[Service]:
    """The service with all its pods up and used by the router; afterwards it is so again, and nothing is held."""
    async with pool.session() as session:
        await pool.wait_ready(session)
        yield pool
        await pool.wait_ready(session)
        await pool.wait_idle(session, 20.0)


async def begin(service: Service, client: aiohttp.ClientSession, streams: list[Stream]) -> list["asyncio.Task[Stream]"]:
    """Begin them all, and wait until each has text."""
    tasks = [asyncio.create_task(stream.read(client, service.url())) for stream in streams]

    async def why_not() -> str:
        for task in tasks:
            if task.done():
                task.result()
        return "" if all(stream.text for stream in streams) else "not every stream has begun"

    await until(why_not, 30)
    return tasks


# ---- pods ----------------------------------------------------------------------------------------------------------


async def legs_at(service: Service, name: Pod) -> float:
    """Legs at a pod."""
    async with service.session() as session:
        return (await service.metrics(session, name))["legs"]


async def busiest(service: Service) -> Pod:
    """The decode pod that has the most legs."""
    counts = {name: await legs_at(service, name) for name in service.engine_pods("decode")}
    return max(counts, key=lambda name: counts[name])


async def working(service: Service, *, but: Pod | None = None) -> Pod:
    """The decode pod that has a leg, once one has."""
    found: list[Pod] = []

    async def why_not() -> str:
        found.clear()
        for name in service.engine_pods("decode"):
            if name == but:
                continue
            try:
                found.extend([name] * bool(await legs_at(service, name)))
            except (aiohttp.ClientError, TimeoutError):
                continue  # it may be dying: another one may be at work
        return "" if found else "no decode pod has a leg"

    await until(why_not, 30)
    return found[0]


def total(metrics: Mapping[str, float], counter: str) -> float:
    """Of a counter, over all its labels."""
    return sum(value for series, value in metrics.items() if series.partition("{")[0] == counter)


async def counted(service: Service, name: Pod, counter: str) -> float:
    """Of one pod, over all labels."""
    async with service.session() as session:
        return total(await service.metrics(session, name), counter)


async def gone(process: psutil.Process, seconds: float) -> None:
    """Fails unless the process ends within so many seconds."""

    async def why_not() -> str:
        try:
            return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.pid} runs"
        except psutil.NoSuchProcess:
            return ""

    await until(why_not, seconds)


async def ended_in_order(service: Service, name: Pod, since: int, seconds: float = 3.0) -> None:
    """Fails unless the launcher tells, behind what it had told before, that the pod ended with status 0.

    Args:
        since: length of the launcher's log when the pod was told to end.
    """

    async def why_not() -> str:
        told = [line for line in service.launcher_log()[since:].splitlines() if f"{name} ended:" in line]
        assert all("exit status 0" in line for line in told), told
        return "" if told else f"the launcher tells of no end of {name}"

    await until(why_not, seconds)
