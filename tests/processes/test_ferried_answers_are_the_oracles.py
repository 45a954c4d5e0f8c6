"""Prefill here, decode there, one router: exact answers, whatever the prompt's length and whatever else is going on."""

import asyncio
import functools
import random

import aiohttp
import psutil
import pytest

from tests.processes.asking import Ask, ask_for, judge
from tests.processes.conftest import LEASE_S
from tests.processes.traffic import Traffic
from tests.support.service import ENGINE_PODS, Service, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

WORDS = "Cars, people and their dogs go over the river on the ferry, and back in the evening. " * 8


async def test_every_length_is_ferried(
    service: Service, internal: aiohttp.ClientSession, client: aiohttp.ClientSession
) -> None:
    """B089: prompts of less than a block, at a border and beside it; short ones are not worth the way."""

    few = asyncio.Semaphore(2)  # at once: more of the longest would hold more blocks than leases may

    async def one(length: int, stream: bool) -> None:
        ask = Ask(f"{length} {stream} {WORDS}"[:length], stream=stream, n=2, max_tokens=9)
        async with few:
            answer = await ask_for(client, service.url(), ask)
        assert answer.ok, answer
        judge(ask, answer)
        assert answer.path == ("disaggregated" if length >= 32 else "aggregated")

    lengths = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 200, 500)
    await asyncio.gather(*(one(length, stream) for length in lengths for stream in (True, False)))
    metrics = await service.metrics(internal, "decode-0")
    assert metrics["kv_pulls_ok_total"] > 0
    await service.wait_idle(internal, 2.0)


async def test_index_learns_what_decode_has(service: Service, client: aiohttp.ClientSession) -> None:
    """A prompt that decode pulled is in its cache, as its state stream says: the next time it is alone, and faster."""
    ask = Ask("Asked twice, by nobody else: " + WORDS[:200], stream=False)
    first = await ask_for(client, service.url(), ask)
    assert first.path == "disaggregated"

    async def asked_again() -> str:
        answer = await ask_for(client, service.url(), ask)
        judge(ask, answer)
        assert answer.usage is not None
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        return "" if answer.path == "aggregated" and cached > 0 else f"{answer.path}, {cached} cached"

    await until(asked_again, 5.0)


async def test_each_prompt_is_counted_once(
    service: Service, internal: aiohttp.ClientSession, client: aiohttp.ClientSession
) -> None:
    """B162: prefill counts the prompts that it computed, decode counts them not again; tokens count where picked."""
    before = [await service.metrics(internal, name) for name in ENGINE_PODS]
    asks = [Ask(f"Counted {number}. {WORDS}"[: 100 + number], max_tokens=10) for number in range(4)]
    for ask in asks:
        assert (await ask_for(client, service.url(), ask)).path == "disaggregated"
    after = [await service.metrics(internal, name) for name in ENGINE_PODS]

    def moved(series: str) -> list[float]:
        return [new[series] - old.get(series, 0.0) for old, new in zip(before, after, strict=True)]

    assert moved("prompt_tokens_total") == [sum(len(ask.prompt) for ask in asks), 0]
    assert moved("generation_tokens_total") == [len(asks), 9 * len(asks)]


async def test_leases_outlive_the_wait_at_decode(
    service: Service, internal: aiohttp.ClientSession, client: aiohttp.ClientSession
) -> None:
    """B076: decode is full for longer than a lease; what waits there renews, and is pulled when its turn comes."""

    async def one(ask: Ask) -> None:
        answer = await ask_for(client, service.url(), ask)
        assert answer.ok, answer
        judge(ask, answer)
        assert answer.path == "disaggregated", answer

    async def runs(count: int) -> str:
        load = await service.load(internal, "decode-0")
        return "" if load.running == count else f"{load}"

    before = await service.metrics(internal, "prefill-0")
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for number in range(3):  # 41 blocks each, and 25 more while they write, of 160
            group.create_task(one(Ask(f"Fills {number}. {WORDS}"[:650], max_tokens=400, stream=False)))
            await until(functools.partial(runs, number + 1), 20.0)
        begun = loop.time()
        await asyncio.gather(
            *(one(Ask(f"Waits {number}. {WORDS}"[:600], max_tokens=4, stream=False)) for number in range(2))
        )
        assert loop.time() - begun > LEASE_S, "they did not wait for long enough to prove anything"
    after = await service.metrics(internal, "prefill-0")
    expired = 'kv_leases_ended_total{why="expired"}'
    assert after.get(expired, 0.0) == before.get(expired, 0.0)


async def test_small_pools_change_nothing(service: Service, internal: aiohttp.ClientSession) -> None:
    """B007, B163: answers of several choices that preempt each other, duplicate ids and leavers; counters only grow."""
    lives = service.pids()
    before = {name: await service.metrics(internal, name) for name in ENGINE_PODS}
    source = random.Random(41)
    async with Traffic(service, 41, clients=16) as traffic, aiohttp.ClientSession() as leaving:
        for number in range(24):
            ask = Ask(f"{number} leaves. {WORDS}"[:200], max_tokens=200, n=3, temperature=0.8, seed=number)
            leaver = asyncio.create_task(_same_name(leaving, service.url(), ask))
            await asyncio.sleep(source.uniform(0.05, 0.25))
            leaver.cancel()
            await asyncio.gather(leaver, return_exceptions=True)
            for name in ENGINE_PODS:
                now = await service.metrics(internal, name)
                fallen = {k: (v, now[k]) for k, v in before[name].items() if "_total" in k and now.get(k, 0.0) < v}
                assert not fallen, f"{name}: {fallen}"
                before[name] = now
        await traffic.answered(20)
    assert not traffic.failed()
    assert before["decode-0"]["num_preemptions_total"] > 0
    assert service.pids() == lives
    await service.wait_idle(internal, 2.0)


async def test_work_leaves_no_socket_and_no_thread(service: Service, internal: aiohttp.ClientSession) -> None:
    """After twice the requests, some of them left, no process has more of either than after the first half."""

    async def half(seed: int) -> dict[str, tuple[int, int]]:
        source = random.Random(seed)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(number: int) -> None:
                ask = Ask(f"{seed} {number} {WORDS}"[:90], max_tokens=10, stream=number % 2 == 0)
                try:
                    async with asyncio.timeout(source.choice([0.02, 0.1, 30.0])):
                        judge(ask, await ask_for(session, service.url(), ask))
                except TimeoutError:
                    pass  # left early, as planned

            for _ in range(5):
                await asyncio.gather(*(one(number) for number in range(10)))
        await service.wait_idle(internal, 3.0)
        found = {}
        for name, pid in service.pids().items():
            process = psutil.Process(pid)
            found["/".join(name)] = (process.num_fds(), process.num_threads())
        return found

    first, second = await half(1), await half(2)
    # Connections that are kept for the next request or closed a moment later, and the threads that serve them; one
    # that leaks per request would be fifty.
    spare = 15
    for name, counts in first.items():
        for before, after in zip(counts, second[name], strict=True):
            assert after <= before + spare, (name, first, second)


async def _same_name(session: aiohttp.ClientSession, url: str, ask: Ask) -> None:
    headers = {"x-request-id": "all-the-same"}
    async with session.post(url + "/v1/completions", json=ask.body(), headers=headers) as response:
        await response.read()


async def test_kept_connections_stay_in_step(service: Service) -> None:
    """B127: 60 requests over four kept connections, some aborted: each answer belongs to its own request."""
    source = random.Random(42)
    connector = aiohttp.TCPConnector(limit=4)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(number: int, *, abort: bool) -> None:
            ask = Ask(f"Mark {number}. {WORDS}"[:60], max_tokens=8, stream=number % 2 == 0)
            if abort:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await ask_for(session, service.url(), ask)
                return
            answer = await ask_for(session, service.url(), ask)
            assert answer.ok, answer
            judge(ask, answer)

        await asyncio.gather(*(one(number, abort=source.random() < 0.2) for number in range(60)))
