"""A decode pod is killed or stopped under the official client: another one goes on, and every token is the oracle's."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest

from tests.processes.asking import Ask, ask_for, judge
from tests.processes.streams import LONG, legs_at, pool_spec, rested, total, working
from tests.support.service import Part, Pod, Service, running_service, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

DECODE: tuple[Pod, ...] = ("decode-0", "decode-1")
TOKENS = 300  # of an answer: 3 s and more, so that what happens to its pod happens in the middle of it


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("resume"), pool_spec(1, 2, lease="3s")) as service:
        yield service


@pytest.fixture
async def service(pool: Service) -> AsyncIterator[Service]:
    """All three pods up and used by the router; nothing is left afterwards."""
    async with rested(pool) as ready:
        yield ready


class Official:
    """One answer as openai-python reads it."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.texts = [""] * ask.n
        self.names: set[tuple[str, int]] = set()
        self.finish: list[str | None] = [None] * ask.n
        self.usage: Any = None

    async def read(self, service: Service) -> "Official":
        body = self.ask.body()
        async with openai.AsyncOpenAI(base_url=service.url() + "/v1", api_key="none", max_retries=0) as client:
            if not self.ask.stream:
                self._take(await client.completions.create(**body))
                return self
            async for chunk in await client.completions.create(**body):
                self._take(chunk)
        return self

    def _take(self, chunk: Any) -> None:
        self.names.add((chunk.id, chunk.created))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            assert self.finish[choice.index] is None, f"choice {choice.index} goes on after its end"
            self.texts[choice.index] += choice.text
            self.finish[choice.index] = choice.finish_reason

    def check(self) -> None:
        """The oracle's answer, of one id and time, with the usage of one answer."""
        assert list(zip(self.texts, self.finish, strict=True)) == self.ask.expected
        assert len(self.names) == 1
        assert self.usage.prompt_tokens == len(self.ask.prompt.encode())
        if not self.ask.stop:
            assert self.usage.completion_tokens == self.ask.n * self.ask.max_tokens

    async def begun(self, characters: int = 20) -> None:
        async def why_not() -> str:
            return "" if len(self.texts[0]) >= characters else "it has not begun"

        await until(why_not, 30)


async def resumes(service: Service, cause: str = "") -> float:
    async with service.session() as session:
        metrics = await service.metrics(session)
    if not cause:
        return total(metrics, "router_resumes_total")
    return metrics.get(f'router_resumes_total{{cause="{cause}"}}', 0.0)


def make_asks(mark: str) -> dict[str, Ask]:
    """Of each kind that can go on wrongly in a way of its own. A stop string is the answer's own, near its end."""
    greedy = Ask(f"{mark}, greedy.{LONG}", TOKENS)
    text = greedy.expected[0][0]
    return {
        "greedy": greedy,
        "sampled": Ask(f"{mark}, sampled.{LONG}", TOKENS, temperature=0.9, seed=7),
        "choices": Ask(f"{mark}, choices.{LONG}", TOKENS, n=2, temperature=0.7, seed=11),
        "stop": Ask(greedy.prompt, TOKENS, stop=text[250:256]),
    }


@pytest.mark.parametrize("part", ["server", "engine"])
async def test_kill_9_in_mid_stream(service: Service, part: Part) -> None:
    """Greedy, seeded, several choices and a stop string at once: both decode pods had some, and one is killed."""
    answers = [Official(ask) for ask in make_asks(f"kill {part}").values() for _ in range(2)]
    before = await resumes(service)
    tasks = [asyncio.create_task(answer.read(service)) for answer in answers]
    for answer in answers:
        await answer.begun()
    pod = await working(service)
    lost = await legs_at(service, pod)
    service.signal(pod, part, signal.SIGKILL)
    for task in tasks:
        (await task).check()
    assert await resumes(service) - before >= lost >= 1


async def test_answers_that_are_not_streamed(service: Service) -> None:
    """Nothing of them had gone out, and nothing is computed from the start."""
    answers = [
        Official(Ask(f"whole {number}.{LONG}", TOKENS, stream=False, temperature=0.8, seed=number, n=1 + number % 2))
        for number in range(4)
    ]
    tasks = [asyncio.create_task(answer.read(service)) for answer in answers]
    pod = await working(service)
    await asyncio.sleep(1.0)  # some way into the answers, which tell nothing of it
    service.signal(pod, "server", signal.SIGKILL)
    for task in tasks:
        (await task).check()


async def test_several_deaths_in_one_answer(service: Service) -> None:
    """The pod that goes on is killed as well: the first one's next life, or the second's, writes the rest."""
    answer = Official(Ask(f"several deaths.{LONG}", 600, temperature=0.9, seed=3))
    task = asyncio.create_task(answer.read(service))
    await answer.begun()
    first = await working(service)
    service.signal(first, "server", signal.SIGKILL)
    second = await working(service, but=first)
    await answer.begun(len(answer.texts[0]) + 50)
    service.signal(second, "engine", signal.SIGKILL)
    (await task).check()


@pytest.mark.parametrize("part", ["server", "engine"])
async def test_stopped_in_mid_stream(service: Service, part: Part) -> None:
    """SIGSTOP for longer than the stall timeout: another pod goes on; what wakes up adds nothing and keeps nothing."""
    answers = [Official(ask) for ask in make_asks(f"stop {part}").values()]
    before = await resumes(service, "stalled")
    tasks = [asyncio.create_task(answer.read(service)) for answer in answers]
    for answer in answers:
        await answer.begun()
    pod = await working(service)
    pid = service.signal(pod, part, signal.SIGSTOP)
    try:
        for task in tasks:
            (await task).check()
        assert await resumes(service, "stalled") > before
    finally:
        os.kill(pid, signal.SIGCONT)
    async with service.session() as session:
        await until(lambda: service.why_not_idle(session), 10)


async def test_killed_router_says_nothing_false_and_frees_both_pods(service: Service) -> None:
    """kill -9 of the router: no stream ends in [DONE], and both pods are free within two seconds."""
    asks = [Ask(f"router {number}.{LONG}", 1500) for number in range(6)]
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client,
        service.session() as session,
    ):
        tasks = [asyncio.create_task(ask_for(client, service.url(), ask)) for ask in asks]

        async def why_not() -> str:
            legs = [await legs_at(service, name) for name in DECODE]
            return "" if sum(legs) == len(asks) else f"{legs} of {len(asks)} are being written"

        await until(why_not, 30)
        service.signal("router", "server", signal.SIGKILL)
        await until(lambda: service.why_not_idle(session), 2.0)
        for ask, task in zip(asks, tasks, strict=True):
            answer = await task
            assert not answer.done
            judge(ask, answer, router_died=True)
