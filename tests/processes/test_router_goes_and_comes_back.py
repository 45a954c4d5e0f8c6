"""The router ends in order or is killed: nobody is told that a cut answer is whole, and the pods are free again."""

import asyncio
import signal
from typing import Any

import aiohttp
import pytest

from tests.processes.asking import NAME, Ask, ask_for, judge
from tests.processes.conftest import LEASE_S
from tests.processes.traffic import Traffic
from tests.support.service import ENGINE_PODS, Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


async def test_killed_router(service: Service, internal: aiohttp.ClientSession) -> None:
    """kill -9 under load: prefixes and broken connections, pods free within a lease, the next router serves.

    B044: it does not draw the seeds of its earlier life again.
    """
    unseeded = {"model": NAME, "prompt": "No seed.", "max_tokens": 24, "temperature": 1.2}
    before = await _text(service, unseeded)
    async with Traffic(service, 51) as traffic:
        await traffic.answered(5)
        traffic.router_died = True
        pid = service.signal("router", "server", signal.SIGKILL)
        await service.reborn(internal, "router", "server", pid)
        assert await _text(service, unseeded) != before
        await traffic.answered(10)
    await service.wait_idle(internal, LEASE_S + 2.0)


async def _text(service: Service, body: dict[str, Any]) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.post(service.url() + "/v1/completions", json=body) as response,
    ):
        text: str = (await response.json())["choices"][0]["text"]
        return text


async def test_router_ends_on_sigterm(service: Service, internal: aiohttp.ClientSession) -> None:
    """Status 0; no prompt and no traceback is in its log; what is under way has its end or an error."""
    async with Traffic(service, 52) as traffic:
        await traffic.answered(5)
        traffic.router_died = True
        pid = service.signal("router", "server", signal.SIGTERM)
        await service.reborn(internal, "router", "server", pid)
    assert "router ended: exit status 0 after" in service.launcher_log()
    await service.wait_idle(internal, LEASE_S + 2.0)


async def test_logs_hold_no_prompt_and_no_traceback(service: Service, client: aiohttp.ClientSession) -> None:
    """Of any process, also for requests that fail."""
    secret = "the ferryman's secret"
    ask = Ask(f"This is {secret}. " * 4)
    judge(ask, await ask_for(client, service.url(), ask))
    for body in ({"prompt": secret, "temperature": "x"}, {"prompt": secret * 1000}, {"prompt": secret, secret: 1}):
        async with client.post(service.url() + "/v1/completions", json={"model": "toy"} | body) as response:
            assert response.status == 400
    await asyncio.sleep(0.3)
    for name in (*ENGINE_PODS, "router"):
        log = service.log(name)
        assert "ferryman" not in log, name
        assert "Traceback" not in log, f"{name}: {log[log.index('Traceback') - 500 :][:3000]}"
