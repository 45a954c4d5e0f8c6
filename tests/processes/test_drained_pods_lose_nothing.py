"""SIGTERM on a pod under load: running answers move with their KV, leases are waited for, and no request fails."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import aiohttp
import msgspec
import psutil
import pytest

from kvferry_wire.frames import End, Prefilled
from kvferry_wire.leg import AbortRequest
from tests.processes.asking import Ask, ask_for, judge
from tests.processes.legs import decode_leg, frames, ids_of, make_leg
from tests.processes.streams import (
    Stream,
    begin,
    busiest,
    counted,
    ended_in_order,
    gone,
    legs_at,
    make_streams,
    pool_spec,
    rested,
    total,
)
from tests.support.service import Pod, Service, running_service, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

LEASE_S = 3.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("drain"), pool_spec(2, 2)) as service:
        yield service


@pytest.fixture(scope="module")
def lone_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    spec = pool_spec(1, 1, lease=f"{LEASE_S:g}s")
    with running_service(tmp_path_factory.mktemp("alone"), spec) as service:
        yield service


@pytest.fixture
async def service(pool: Service) -> AsyncIterator[Service]:
    """All four pods up and used by the router; nothing is left afterwards."""
    async with rested(pool) as ready:
        yield ready


@pytest.fixture
async def pair(lone_pair: Service) -> AsyncIterator[Service]:
    """The same of the service with one pod of each kind."""
    async with rested(lone_pair) as ready:
        yield ready


def drain(service: Service, name: Pod) -> tuple[psutil.Process, int]:
    """SIGTERM: the process, and how long the launcher's log is."""
    told = len(service.launcher_log())
    return psutil.Process(service.signal(name, "server", signal.SIGTERM)), told


# ---- decode --------------------------------------------------------------------------------------------------------


async def test_streams_of_a_decode_pod_move_with_their_kv(service: Service, client: aiohttp.ClientSession) -> None:
    """Eight streams: none fails, every token is the oracle's, each that moved says so and was pulled, not computed.

    The pod ends with status 0 long before the answers do.
    """
    streams = make_streams(8, "moved")
    before = {name: await counted(service, name, "kv_pulls_ok_total") for name in service.engine_pods("decode")}
    tasks = await begin(service, client, streams)
    pod = await busiest(service)
    (other,) = [name for name in service.engine_pods("decode") if name != pod]
    legs = await legs_at(service, pod)
    assert legs >= 1
    process, told = drain(service, pod)
    await gone(process, 6)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        await task
    moved = [stream for stream in streams if stream.comments]
    assert [stream.comments for stream in moved] == [[": kvferry resumed: moved"]] * len(moved)
    assert len(moved) == legs
    # The other pod has pulled the prompts of its own legs, and all of the others.
    assert await counted(service, other, "kv_pulls_ok_total") - before[other] == len(streams)
    assert await counted(service, other, "kv_recomputed_total") == 0
    await ended_in_order(service, pod, told)


async def test_new_requests_avoid_a_drained_pod_at_once(service: Service, client: aiohttp.ClientSession) -> None:
    """From the signal on no request fails, and within a second the other decode pod is the only one that gets any."""
    streams = make_streams(2, "kept busy", tokens=150)
    tasks = await begin(service, client, streams)
    pod = await busiest(service)
    _, told = drain(service, pod)

    async def not_ready() -> str:
        async with service.session() as session:
            try:
                async with session.get(service.url(pod) + "/readyz") as response:
                    return "it is ready" if response.status == 200 else ""
            except aiohttp.ClientConnectionError:
                return ""

    await until(not_ready, 1.0)
    for stream in make_streams(6, "after the signal", tokens=10):
        await stream.read(client, service.url())
        assert not stream.comments
    for task in tasks:
        await task
    await ended_in_order(service, pod, told, 10.0)


async def test_source_killed_in_a_move_costs_no_token(service: Service, client: aiohttp.ClientSession) -> None:
    """The pod is asked to drain and killed in the same moment: what was not pulled is computed again, exactly."""
    streams = make_streams(6, "killed")
    tasks = await begin(service, client, streams)
    pod = await busiest(service)
    async with service.session() as session, session.post(service.url(pod) + "/internal/v1/drain") as response:
        assert response.status == 204
    await asyncio.sleep(0.1)  # the router hears of it, and asks
    service.signal(pod, "server", signal.SIGKILL)
    for task in tasks:
        await task
    assert [comment for stream in streams for comment in stream.comments if "resumed" in comment]


async def test_drain_shows_and_the_router_takes_the_streams(service: Service, client: aiohttp.ClientSession) -> None:
    """`POST /internal/v1/drain` alone: the pod stays, tells that it drains, empties, and takes nothing new."""
    tasks = await begin(service, client, make_streams(4, "shown"))
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
        for task in [*tasks, *await begin(service, client, make_streams(3, "late", 20))]:
            await task
        assert (await service.info(session, pod)).legs == 0
    service.signal(pod, "server", signal.SIGTERM)  # the next life takes legs again


async def test_decode_told_to_end_while_it_pulls_loses_nothing(service: Service, client: aiohttp.ClientSession) -> None:
    """The leg leaves once it has its KV, or gives its request back: the answer is the oracle's, the pod ends in order.

    The prefill engine stands still while decode pulls, so that the signal comes in the middle of the transfer.
    """
    stopped: list[int] = []
    (stream,) = make_streams(1, "in transfer", tokens=150)
    try:
        async with service.session() as session:
            asked, pod = await pulling(service, session, client, stream, stopped)
            process, told = drain(service, pod)
            await asyncio.sleep(0.3)
            assert process.is_running()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    await asked
    await gone(process, 8)
    await ended_in_order(service, pod, told)


async def pulling(
    service: Service,
    session: aiohttp.ClientSession,
    client: aiohttp.ClientSession,
    stream: Stream,
    stopped: list[int],
) -> tuple["asyncio.Task[Stream]", Pod]:
    """Ask, and stop the engine that holds the lease before decode can pull; then the decode pod that pulls.

    Decode's engines stand still until the lease is there: a pull can be over before a signal reaches anything.
    """
    found: list[Pod] = []
    held_up = [service.signal(name, "engine", signal.SIGSTOP) for name in service.engine_pods("decode")]

    async def leased() -> str:
        for name in service.engine_pods("prefill"):
            if (await service.load(session, name)).leases:
                stopped.append(service.signal(name, "engine", signal.SIGSTOP))
                return ""
        return "no lease"

    async def held() -> str:
        found[:] = [name for name in service.engine_pods("decode") if await legs_at(service, name)]
        return "" if found else "no decode pod has the leg"

    try:
        asked = asyncio.create_task(stream.read(client, service.url()))
        await until(leased, 10)
        await until(held, 10)
    finally:
        for pid in held_up:
            os.kill(pid, signal.SIGCONT)
    return asked, found[0]


async def test_streams_of_the_only_decode_pod_end_there(pair: Service, client: aiohttp.ClientSession) -> None:
    """Nobody could go on: they end well within the grace, and nothing of them is moved or lost."""
    streams = make_streams(4, "alone", tokens=80)
    tasks = await begin(pair, client, streams)
    process, told = drain(pair, "decode-0")
    for task in tasks:
        await task
    assert [stream.comments for stream in streams] == [[]] * 4
    await gone(process, 12)
    assert "grace to drain is over" not in pair.log("decode-0")
    await ended_in_order(pair, "decode-0", told)


async def test_a_second_signal_ends_a_drain_at_once(pair: Service, client: aiohttp.ClientSession) -> None:
    """Nobody waits for the grace who does not want to; the answer goes on at the pod's next life."""
    streams = make_streams(1, "twice", tokens=300)
    tasks = await begin(pair, client, streams)
    process, _ = drain(pair, "decode-0")
    await asyncio.sleep(0.3)
    assert process.is_running()
    process.send_signal(signal.SIGTERM)
    await gone(process, 2)
    await tasks[0]
    assert streams[0].comments == [": kvferry resumed: dead"]


# ---- prefill -------------------------------------------------------------------------------------------------------


async def test_prefill_under_load_fails_no_request(service: Service) -> None:
    """Streams come one after the other while a prefill pod ends and comes back: all whole, all tokens right."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:

        async def ask(client: int) -> None:
            for number in range(6):
                (stream,) = make_streams(1, f"load {client} {number}", tokens=20)
                await stream.read(session, service.url())

        tasks = [asyncio.create_task(ask(client)) for client in range(6)]
        process, told = drain(service, "prefill-0")
        await gone(process, 12)
        for task in tasks:
            await task
    assert "Traceback" not in service.log("prefill-0")
    await ended_in_order(service, "prefill-0", told)


async def _leased(pair: Service, session: aiohttp.ClientSession, mark: str) -> tuple[psutil.Process, int, Prefilled]:
    """A prompt is prefilled, and nobody has come for it when prefill is told to end: it waits, and says for what."""
    (answer,) = await frames(pair, session, "prefill-0", make_leg(mark))
    assert isinstance(answer, Prefilled)
    process, told = drain(pair, "prefill-0")

    async def shown() -> str:
        info = await pair.info(session, "prefill-0")
        metrics = await pair.metrics(session, "prefill-0")
        seen = (info.draining, info.legs, info.leases, metrics["draining"], metrics["kv_leases"])
        return "" if seen == (True, 0, 1, 1, 1) else f"draining, legs, leases, and as metrics: {seen}"

    await until(shown, 1.0)
    assert process.is_running()
    return process, told, answer


async def test_prefill_waits_until_its_lease_is_read(pair: Service, internal_of_pair: aiohttp.ClientSession) -> None:
    """Handed over: decode pulls from the pod that is about to end, which ends at once when that is done."""
    process, told, answer = await _leased(pair, internal_of_pair, "drained and read")
    before = await pair.metrics(internal_of_pair, "decode-0")
    leg = make_leg("drained and read")
    found = await frames(pair, internal_of_pair, "decode-0", decode_leg(leg, answer))
    assert len(ids_of(found)) == leg.sampling.max_tokens - 1
    await gone(process, 1.5)
    end = found[-1]
    assert isinstance(end, End)
    assert end.recomputed == ""

    async def counted_once() -> str:
        after = await pair.metrics(internal_of_pair, "decode-0")
        pulls = total(after, "kv_pulls_ok_total") - total(before, "kv_pulls_ok_total")
        return "" if pulls == 1 else f"{pulls:g} pulls were counted"

    await until(counted_once, 2.0)
    await ended_in_order(pair, "prefill-0", told)


async def test_prefill_waits_until_its_lease_is_given_up(
    pair: Service, internal_of_pair: aiohttp.ClientSession
) -> None:
    """Released: the request is aborted by its name, and there is nothing to wait for any more."""
    process, told, _ = await _leased(pair, internal_of_pair, "drained and aborted")
    begun = asyncio.get_running_loop().time()
    body = msgspec.msgpack.encode(AbortRequest(internal_id="drained and aborted", attempt=0))
    async with internal_of_pair.post(pair.url("prefill-0") + "/internal/v1/abort", data=body) as response:
        assert response.status == 204
    await gone(process, LEASE_S / 2)
    assert asyncio.get_running_loop().time() - begun < LEASE_S / 2
    await ended_in_order(pair, "prefill-0", told)


async def test_prefill_waits_no_longer_than_its_lease_lasts(
    pair: Service, internal_of_pair: aiohttp.ClientSession
) -> None:
    """Expired: nobody comes, and the pod ends when the lease does, well before its grace is over."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    process, told, _ = await _leased(pair, internal_of_pair, "drained and left")
    await gone(process, LEASE_S + 1.0)
    assert loop.time() - begun > LEASE_S - 0.5
    assert "grace to drain is over" not in pair.log("prefill-0")
    await ended_in_order(pair, "prefill-0", told)


async def test_prefill_told_to_end_in_a_transfer_lets_it_finish(pair: Service) -> None:
    """The signal comes while decode pulls: the KV is ferried all the same, and the answer is the oracle's."""
    ask = Ask("In the middle of a transfer, prefill is told to end. " * 4, max_tokens=60)
    engine = pair.pid("prefill-0", "engine")
    assert engine is not None
    before = await counted(pair, "decode-0", "kv_pulls_ok_total")
    stopped = [pair.signal("decode-0", "server", signal.SIGSTOP)]
    try:
        async with (
            pair.session() as session,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client,
        ):
            asked = asyncio.create_task(ask_for(client, pair.url(), ask))

            async def leased() -> str:
                return "" if (await pair.load(session, "prefill-0")).leases else "no lease"

            await until(leased, 10)
            os.kill(engine, signal.SIGSTOP)
            stopped.append(engine)
            os.kill(stopped.pop(0), signal.SIGCONT)

            async def pulls() -> str:
                return "" if (await pair.load(session, "decode-0")).waiting else "decode has not taken the leg"

            await until(pulls, 10)
            process, told = drain(pair, "prefill-0")
            await asyncio.sleep(0.3)
            assert process.is_running()
            os.kill(stopped.pop(), signal.SIGCONT)
            answer = await asked
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    judge(ask, answer)
    assert answer.ok
    assert answer.path == "disaggregated"

    async def counted_once() -> str:
        pulls = await counted(pair, "decode-0", "kv_pulls_ok_total") - before
        return "" if pulls == 1 else f"{pulls:g} pulls were counted"

    await until(counted_once, 2.0)
    await gone(process, 3)
    await ended_in_order(pair, "prefill-0", told)


@pytest.fixture
async def internal_of_pair(pair: Service) -> AsyncIterator[aiohttp.ClientSession]:
    async with pair.session() as session:
        yield session
