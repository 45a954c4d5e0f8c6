"""What clients see of a death, in seconds: 32 streams over their decode pod's, prompts over prefill's, one router's."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from kvferry_wire.state import decode_snapshot
from tests.processes.asking import Answer, Ask, ask_for, judge
from tests.processes.streams import LONG, Stream, begin, busiest, legs_at, pool_spec, rested, total
from tests.support.router_process import running_router
from tests.support.service import Pod, Service, running_service, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STREAMS = 32
GAP_S = 3.0  # that a stream may stand still
AVOIDED_S = 1.0  # until nothing new goes to a pod that has died
FIRST_S = 2.0  # of the first answer by a pod that is ready again
VOID_S = 2.0  # until the index has nothing of an earlier life
FREED_S = 2.0  # until nothing of a dead router is at work
ROUTER_BACK_S = 6.0  # of which a machine with nothing else to do takes half


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    spec = pool_spec(2, 2, lease="3s")
    spec["engine"] |= {"kvBlocks": 1200, "tokenBudget": 256}
    with running_service(tmp_path_factory.mktemp("deaths"), spec) as service:
        yield service


@pytest.fixture
async def service(pool: Service) -> AsyncIterator[Service]:
    """All four pods up and used by the router; nothing is left afterwards."""
    async with rested(pool) as ready:
        yield ready


async def test_32_streams_outlive_a_decode_pod(service: Service, client: aiohttp.ClientSession) -> None:
    """kill -9 at a random moment: every stream ends right, none stands still for more than three seconds.

    Within a second the router uses the other decode pod alone, and what is asked then is answered there.
    """
    source = random.Random(1)
    streams = [Stream(Ask(f"one of many {n}.{LONG}", source.randint(64, 256))) for n in range(STREAMS)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many:
        tasks = await begin(service, many, streams)
        pod = await busiest(service)
        legs = await legs_at(service, pod)
        await asyncio.sleep(source.uniform(0.0, 0.3))
        service.signal(pod, "server", signal.SIGKILL)

        async def avoided() -> str:
            async with service.session() as session:
                metrics = await service.metrics(session)
            ready = metrics.get('router_pods{role="decode",state="ready"}', 0.0)
            return "" if ready == 1 else f"{ready:g} decode pods are used"

        await until(avoided, AVOIDED_S)
        fresh = [Stream(Ask(f"asked after the death {n}.{LONG}", 8)) for n in range(4)]
        await asyncio.gather(*(stream.read(client, service.url()) for stream in fresh))
        for task in tasks:
            await task
    resumed = [stream for stream in streams if stream.comments]
    assert len(resumed) >= min(legs, 4)
    assert all(stream.comments == [": kvferry resumed: dead"] for stream in resumed)
    assert not any(stream.comments for stream in fresh)
    gaps = sorted(stream.gap_s for stream in resumed)
    assert gaps[-1] <= GAP_S, gaps


async def test_prefill_dies_before_its_kv_is_pulled(service: Service, client: aiohttp.ClientSession) -> None:
    """With another prefill pod alive no client sees an error, nor waits three seconds more: the answer is the same."""
    ask = Ask(f"Prefill dies before the pull.{LONG}" * 3, max_tokens=40)
    undisturbed = await ask_for(client, service.url(), ask)
    judge(ask, undisturbed)
    ask = Ask(f"Prefill dies before its KV is pulled.{LONG}" * 3, max_tokens=40)
    stopped = [service.signal(name, "server", signal.SIGSTOP) for name in service.engine_pods("decode")]
    try:
        asked = asyncio.create_task(ask_for(client, service.url(), ask))
        leasing = await _leasing(service)
        service.signal(leasing, "engine", signal.SIGKILL)
        service.signal(leasing, "server", signal.SIGKILL)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    answer = await asked
    judge(ask, answer)
    assert answer.ok
    assert loop.time() - begun < undisturbed.seconds + GAP_S


async def _leasing(service: Service) -> Pod:
    """The prefill pod that has a lease, once one has."""
    found: list[Pod] = []

    async def why_not() -> str:
        async with service.session() as session:
            found[:] = [name for name in service.engine_pods("prefill") if (await service.load(session, name)).leases]
        return "" if found else "no lease"

    await until(why_not, 10)
    return found[0]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_pod_that_is_back_at_its_address_is_used_at_once(service: Service, role: str) -> None:
    """After its new life is ready: the index has nothing of the old one, and the first answer is right and prompt.

    All pods of the role die, so that it is this life, and not another pod, that has to answer.
    """
    asks = [Ask(f"Before {role} dies {n}.{LONG * 4}", 8) for n in range(8)]
    async with service.session() as session, aiohttp.ClientSession() as client:
        for answer in await asyncio.gather(*(ask_for(client, service.url(), ask) for ask in asks)):
            assert answer.ok
        pods = service.engine_pods(role)
        assert sum([len(await _cached(service, session, name)) for name in pods]) > 0
        lives = {name: (await service.info(session, name)).incarnation for name in pods}
        killed = {name: service.signal(name, "server", signal.SIGKILL) for name in pods}
        for name, pid in killed.items():
            await service.reborn(session, name, "server", pid)
        assert not set(lives.values()) & {(await service.info(session, name)).incarnation for name in pods}
        ask = Ask(f"Before {role} dies 0.{LONG * 4}", 8)
        answer = await ask_for(client, service.url(), ask)
        judge(ask, answer)
        assert answer.ok
        assert answer.seconds < FIRST_S
        assert answer.path in ("disaggregated", "aggregated")  # nothing was asked of the life before

        async def void() -> str:
            indexed = (await service.metrics(session))["router_index_blocks"]
            held = sum([len(await _cached(service, session, name)) for name in service.engine_pods()])
            return "" if indexed == held else f"{indexed:g} blocks are indexed, pods have {held}"

        await until(void, VOID_S)


async def _cached(service: Service, session: aiohttp.ClientSession, name: Pod) -> tuple[bytes, ...]:
    async with session.get(service.url(name) + "/internal/v1/state") as response:
        return decode_snapshot(await response.read()).hashes


async def test_one_router_of_two_dies(service: Service, tmp_path: Path) -> None:
    """Its clients see a broken stream; its work is aborted within two seconds; the answers of the other are whole."""
    asks = [Ask(f"one of two routers {n}.{LONG}", 300) for n in range(STREAMS)]
    with running_router(tmp_path, service.state.router_keys, "--disaggregate-min-tokens", "32") as second:
        pods = {name: {"role": service.pod(name).role, **service.pod(name).ports} for name in service.engine_pods()}
        second.name_pods(**pods)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
            service.session() as session,
        ):
            await until(lambda: _uses_all(client, second.url, len(pods)), 20)
            first_url = service.url()
            asked = [
                asyncio.create_task(ask_for(client, url, ask))
                for ask, url in zip(asks, [first_url, second.url] * (STREAMS // 2), strict=True)
            ]

            async def writing() -> str:
                legs = [await legs_at(service, name) for name in service.engine_pods("decode")]
                return "" if sum(legs) == STREAMS else f"{legs} of {STREAMS} are being written"

            await until(writing, 30)
            pid = service.signal("router", "server", signal.SIGKILL)

            async def freed() -> str:
                legs = [await legs_at(service, name) for name in service.engine_pods("decode")]
                return "" if sum(legs) <= STREAMS // 2 else f"{legs}"

            await until(freed, FREED_S)
            answers: list[Answer] = [await task for task in asked]
            for ask, answer in zip(asks[::2], answers[::2], strict=True):
                judge(ask, answer, router_died=True)
                assert not answer.done
            for ask, answer in zip(asks[1::2], answers[1::2], strict=True):
                judge(ask, answer)
                assert answer.ok

            async def back() -> str:
                return "" if service.pid("router") not in (None, pid) else "no new router"

            await until(back, ROUTER_BACK_S)
            await service.wait_ready(session)


async def _uses_all(client: aiohttp.ClientSession, url: str, pods: int) -> str:
    async with client.get(url + "/metrics") as response:
        lines = [line.rpartition(" ") for line in (await response.text()).splitlines() if line.startswith("kvferry:")]
    found = {series.removeprefix("kvferry:"): float(value) for series, _, value in lines}
    ready = sum(value for series, value in found.items() if series.startswith("router_pods{") and '"ready"' in series)
    return "" if ready == pods else f"it uses {ready:g} pods of {total(found, 'router_pods'):g}"
