"""An engine that is stuck in a step is told, killed and replaced; one that has nothing to do never is, however long."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest

from kvferry_runtime.core.messages import FailOut, LegKey, Submit
from kvferry_runtime.engine.client import EngineClient
from kvferry_runtime.engine.messages import EngineConfig
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.leg import Sampling
from kvferry_wire.limits import DEFAULT_LIMITS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

# A fifth of the real times, so that seconds stand for minutes.
LIMITS = msgspec.structs.replace(DEFAULT_LIMITS, stall_timeout_s=1.0, engine_wedged_s=2.0, engine_kill_s=4.0)
IDLE_S = 14.0  # several times as long as a stuck engine lives
START_S = 60.0


@asynccontextmanager
async def running(model: str) -> AsyncIterator[EngineClient]:
    config = EngineConfig(model=model, model_digest="", threads=1, log_level="WARNING", limits=LIMITS)
    client = EngineClient(config)
    client.start()
    try:
        async with asyncio.timeout(START_S):
            await client.wait_ready()
        yield client
    finally:
        await client.close()


def make_submit(name: str) -> Submit:
    return Submit(
        key=LegKey(name, 0),
        kind="generate",
        prompt_ids=tuple(range(20)),
        emitted=((),),
        sampling=Sampling(seed=0, max_tokens=4),
        extras=KeyExtras(),
        deadline_s=60.0,
        eos_token_ids=(),
    )


async def until(true: Callable[[], object], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not true():
        assert loop.time() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.02)


async def test_a_step_that_never_ends_is_the_engines_end() -> None:
    """Not ready, then not live, then killed: the leg fails, and another engine takes legs."""
    async with running("toy:step_ms=600000") as client:
        pid, first = client.pid, client.info
        assert pid is not None
        assert first is not None
        stream = client.submit(make_submit("stuck"))
        await until(client.not_ready, LIMITS.stall_timeout_s + 1.0)
        assert "done nothing" in client.not_ready()
        await until(client.not_live, LIMITS.engine_wedged_s + 1.0)
        output = await stream.next(LIMITS.engine_kill_s + 2.0)
        assert isinstance(output, FailOut)
        assert output.kind == "internal"
        await until(lambda: not psutil.pid_exists(pid) or client.pid != pid, 5.0)
        await until(lambda: client.info is not None and client.info.incarnation != first.incarnation, START_S)
        assert client.not_ready() == client.not_live() == ""
        assert client.starts == 2


async def test_a_pod_whose_engine_starts_again_is_live_however_long_that_takes() -> None:
    """Loading says nothing: whoever restarted the pod for that would only make it load once more."""
    async with running("toy") as client:
        former = client.pid
        assert former is not None
        os.kill(former, signal.SIGKILL)
        await until(lambda: client.pid not in (None, former), 10.0)
        starting = client.pid
        assert starting is not None
        os.kill(starting, signal.SIGSTOP)  # it loads
        try:
            await asyncio.sleep(LIMITS.engine_kill_s + 1.0)
            assert client.not_live() == ""
            assert client.not_ready() != ""
        finally:
            os.kill(starting, signal.SIGCONT)
        await until(lambda: client.not_ready() == "", START_S)
        assert (client.pid, client.starts) == (starting, 2)


async def test_an_idle_engine_is_never_replaced() -> None:
    """It ticks: live all the time, in its first life, and ready at the end."""
    async with running("toy") as client:
        loop, told = asyncio.get_running_loop(), set()
        until_s = loop.time() + IDLE_S
        while loop.time() < until_s:
            told.add((client.not_live(), client.pid, client.starts))
            await asyncio.sleep(0.05)
        assert len(told) == 1, told
        assert client.not_live() == client.not_ready() == ""
        assert await client.snapshot()
