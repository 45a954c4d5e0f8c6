"""SIGSTOP and SIGCONT of each process while clients ask, for less and for more than stall timeout and lease."""

import asyncio
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
LONG_S = 7.0  # more than both
assert SHORT_S < LEASE_S < MIDDLE_S < DEFAULT_LIMITS.stall_timeout_s < LONG_S < DEFAULT_LIMITS.engine_kill_s


async def paused(
    service: Service, session: aiohttp.ClientSession, seed: int, pod: Pod, part: Part, seconds: float
) -> Traffic:
    """Pause it at a random moment under load; it goes on as the same process, and answers are as usual again."""
    source = random.Random(seed)
    async with Traffic(service, seed) as traffic:
        await traffic.answered(5)
        await asyncio.sleep(source.uniform(0.0, 0.5))
        pid = service.signal(pod, part, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            service.signal(pod, part, signal.SIGCONT)
        await service.wait_ready(session, 30.0)
        assert service.pid(pod, part) == pid
        before = len(traffic.answers)
        await traffic.answered(12)
        assert "disaggregated" in [answer.path for _, answer in traffic.answers[before:] if answer.ok]
    await service.wait_idle(session, LEASE_S + 5.0)
    return traffic


@pytest.mark.parametrize("seconds", [SHORT_S, MIDDLE_S, LONG_S])
@pytest.mark.parametrize("part", ["server", "engine"])
async def test_paused_prefill_costs_no_answer(
    service: Service, internal: aiohttp.ClientSession, part: Part, seconds: float
) -> None:
    """Its leases may end and its legs stall: every request is answered in full."""
    traffic = await paused(service, internal, 21, "prefill-0", part, seconds)
    assert not traffic.failed()


@pytest.mark.parametrize("part", ["server", "engine"])
async def test_shortly_paused_decode_costs_no_answer(
    service: Service, internal: aiohttp.ClientSession, part: Part
) -> None:
    """Answers wait and go on, with not a token changed, doubled or lost."""
    traffic = await paused(service, internal, 22, "decode-0", part, SHORT_S)
    assert not traffic.failed()


@pytest.mark.parametrize("part", ["server", "engine"])
async def test_long_paused_decode_ends_answers_in_an_error(
    service: Service, internal: aiohttp.ClientSession, part: Part
) -> None:
    """After the stall timeout each stream ends in an error; what the pod says when it goes on reaches nobody."""
    traffic = await paused(service, internal, 23, "decode-0", part, LONG_S)
    assert traffic.failed()
    slowest = max(answer.seconds for _, answer in traffic.failed())
    assert slowest < LONG_S + 5.0, "a stalled answer was not ended by its stall timeout"


async def test_paused_router_costs_no_answer(service: Service, internal: aiohttp.ClientSession) -> None:
    """What arrived meanwhile is taken before anything is judged: no leg is given up for the router's own pause."""
    traffic = await paused(service, internal, 24, "router", "server", LONG_S)
    assert not traffic.failed()
