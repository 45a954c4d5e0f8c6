"""kill -9 of each process of a service while clients ask: right answers or explicit errors, then service as before."""

import asyncio
import random
import signal

import aiohttp
import pytest

from tests.processes.conftest import LEASE_S
from tests.processes.traffic import Traffic
from tests.support.service import Part, Pod, Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SETTLE_S = LEASE_S + 5.0  # leases whose reader died end with their time at the latest


async def killed(service: Service, session: aiohttp.ClientSession, seed: int, pod: Pod, part: Part) -> Traffic:
    """Kill it at a random moment under load, wait for its next life, and see answers of the usual kind again."""
    source = random.Random(seed)
    async with Traffic(service, seed) as traffic:
        await traffic.answered(5)
        await asyncio.sleep(source.uniform(0.0, 1.0))
        pid = service.signal(pod, part, signal.SIGKILL)
        await service.reborn(session, pod, part, pid)
        before = len(traffic.answers)
        await traffic.answered(20)
        later = [answer.path for _, answer in traffic.answers[before:] if answer.ok]
        assert "disaggregated" in later, later
    await service.wait_idle(session, SETTLE_S)
    return traffic


@pytest.mark.parametrize("part", ["server", "engine"])
async def test_killed_prefill_costs_no_answer(service: Service, internal: aiohttp.ClientSession, part: Part) -> None:
    """Every request under way and every later one is answered in full; decode computes what it has to."""
    traffic = await killed(service, internal, 11, "prefill-0", part)
    assert not traffic.failed()


@pytest.mark.parametrize("part", ["server", "engine"])
async def test_killed_decode_ends_answers_in_an_error(
    service: Service, internal: aiohttp.ClientSession, part: Part
) -> None:
    """What the client has is a prefix of the answer and the end is an error; prefill's blocks come back."""
    traffic = await killed(service, internal, 12, "decode-0", part)
    assert traffic.failed()
    cut = [answer for _, answer in traffic.failed() if answer.status == 200]
    assert cut, "no stream was under way"
