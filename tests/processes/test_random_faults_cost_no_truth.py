"""Several faults of several processes at random moments: whatever falls together, no wrong token and nothing left.

One seed is one schedule. ``KVFERRY_CHAOS_SEEDS=20`` runs that many, from ``KVFERRY_CHAOS_FIRST`` on (default 0).
"""

import asyncio
import os
import random
import signal
from contextlib import suppress

import aiohttp
import pytest

from tests.processes.conftest import LEASE_S
from tests.processes.traffic import Traffic
from tests.support.service import Part, Pod, Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

FIRST = int(os.environ.get("KVFERRY_CHAOS_FIRST", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("KVFERRY_CHAOS_SEEDS", "1")))
TARGETS: tuple[tuple[Pod, Part], ...] = (
    ("prefill-0", "server"),
    ("prefill-0", "engine"),
    ("decode-0", "server"),
    ("decode-0", "engine"),
    ("router", "server"),
)


async def fault(service: Service, source: random.Random, traffic: Traffic) -> str:
    """One fault at a random moment; a pause ends by itself. What it hits may be gone already."""
    await asyncio.sleep(source.uniform(0.0, 3.0))
    pod, part = source.choice(TARGETS)
    pause_s = source.choice([0.0, 0.0, 0.3, 2.0, 6.0])
    with suppress(ProcessLookupError):  # told below
        if service.pid(pod, part) is None:
            return f"{pod} {part}: nothing to hit"
        if not pause_s:
            traffic.router_died |= pod == "router"
            pid = service.signal(pod, part, signal.SIGKILL)
            async with service.session() as session:
                await service.reborn(session, pod, part, pid)
            return f"{pod} {part}: killed"
        pid = service.signal(pod, part, signal.SIGSTOP)
        try:
            await asyncio.sleep(pause_s)
        finally:
            os.kill(pid, signal.SIGCONT)
    return f"{pod} {part}: paused {pause_s} s"


@pytest.mark.parametrize("seed", SEEDS)
async def test_schedule(service: Service, internal: aiohttp.ClientSession, seed: int) -> None:
    """Three faults under load; afterwards the service is whole, answers as ever and holds nothing."""
    source = random.Random(f"chaos/{seed}")
    faults = [random.Random(f"chaos/{seed}/{number}") for number in range(3)]
    async with Traffic(service, 1000 + seed, clients=source.choice([4, 10, 16])) as traffic:
        await traffic.answered(3)
        done = await asyncio.gather(*(fault(service, each, traffic) for each in faults))
        await service.wait_ready(internal)
        before = traffic.well()
        await traffic.answered(10)
        assert traffic.well() >= before + 10, done
    await service.wait_idle(internal, LEASE_S + 5.0)
