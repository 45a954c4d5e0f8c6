"""SIGSTOP and SIGCONT of each process while clients ask, for less and for more than stall timeout and lease."""

import asyncio
import os
import random
import signal

import aiohttp
import pytest

from kvferry_wire.limits import DEFAULT_LIMITS
from tests.processes.conftest import LEASE_S
from tests.processes.traffic import Traffic
from tests.support.service import Part, Pod, Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SHORT_S = 1.5  # less than the lease and than the stall timeout
MIDDLE_S = 4.0  # more than the lease
LONG_S = 6.0  # more than both
assert SHORT_S < LEASE_S < MIDDLE_S < DEFAULT_LIMITS.stall_timeout_s < LONG_S < DEFAULT_LIMITS.engine_kill_s


async def pause(service: Service, pod: Pod, part: Part, seconds: float) -> None:
    """Pause it; it goes on as the same process."""
    pid = service.signal(pod, part, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert service.pid(pod, part) == pid


async def paused(
    service: Service, session: aiohttp.ClientSession, seed: int, *pauses: tuple[Pod, Part, float]
) -> Traffic:
    """Pause these at random moments under load; afterwards answers are as usual again, and nothing is held."""
    source = random.Random(seed)

    async def one(pod: Pod, part: Part, seconds: float, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await pause(service, pod, part, seconds)

    async with Traffic(service, seed) as traffic:
        await traffic.answered(5)
        async with asyncio.TaskGroup() as group:
            for pod, part, seconds in pauses:
                group.create_task(one(pod, part, seconds, source.uniform(0.0, 0.5)))
        await service.wait_ready(session, 30.0)
        ferried = traffic.paths()["disaggregated"]
        async with asyncio.timeout(60):
            while traffic.paths()["disaggregated"] == ferried:
                await traffic.answered(4)
    await service.wait_idle(session, LEASE_S + 5.0)
    return traffic


async def test_paused_prefill_costs_no_answer(service: Service, internal: aiohttp.ClientSession) -> None:
    """Its legs stall, what it had answered reaches nobody, and decode stands still for a moment: all are answered."""
    traffic = await paused(service, internal, 21, ("prefill-0", "server", LONG_S), ("decode-0", "engine", SHORT_S))
    assert not traffic.failed()


@pytest.mark.parametrize(("part", "prefill_pause"), [("server", ("engine", LONG_S)), ("engine", ("server", SHORT_S))])
async def test_long_paused_decode_costs_no_answer_that_had_begun(
    service: Service, internal: aiohttp.ClientSession, part: Part, prefill_pause: tuple[Part, float]
) -> None:
    """Its streams go on once it is back, token for token; what it still says of the old legs reaches nobody.

    A request without a token may be told by its status that there is no engine: the service has but this one.
    """
    before = await service.metrics(internal)
    traffic = await paused(service, internal, 23, ("decode-0", part, LONG_S), ("prefill-0", *prefill_pause))
    assert [answer for _, answer in traffic.failed() if answer.status == 200 or any(answer.texts)] == []
    after = await service.metrics(internal)
    resumes = [name for name in after if name.startswith("router_resumes_total")]
    assert sum(after[name] - before.get(name, 0.0) for name in resumes) > 0


async def test_paused_router_costs_no_answer(service: Service, internal: aiohttp.ClientSession) -> None:
    """What arrived meanwhile is taken before anything is judged: no leg is given up for the router's own pause.

    Prefill pauses too, for less than the router would call a stall and for more than its leases last.
    """
    traffic = await paused(service, internal, 24, ("router", "server", LONG_S), ("prefill-0", "engine", MIDDLE_S))
    assert not traffic.failed()
