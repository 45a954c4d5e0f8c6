"""A request that is over is freed at once: it waits for no full collection, however long it took.

One that took seconds is in the collector's oldest generation, whose collections are hundreds of requests apart.
"""

import asyncio
import gc
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry_router import proxy
from kvferry_router.alarm import Alarm
from kvferry_router.proxy import RequestRun

from .harness import Router, running, until
from .scripted_pod import Script, ScriptedPod

PROMPT = "the marker of this request"


@pytest.fixture
def no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reference counts alone free what is over; timers that hold a request's tasks are short."""
    monkeypatch.setattr(proxy, "_DRAIN_S", 0.01)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def ask(router: Router, *, stream: bool, pieces: int | None = None) -> None:
    """Ask, and leave after so many pieces of the answer."""
    async with router.complete(PROMPT, stream=stream) as response:
        async for _ in response.content.iter_any():
            if pieces is not None and (pieces := pieces - 1) <= 0:
                response.close()
                return


async def all_freed() -> bool:
    """Whether no request is left."""
    await asyncio.sleep(0.05)
    return not any(type(each) is RequestRun for each in gc.get_objects())


WAYS: dict[str, tuple[dict[str, Script], bool, int | None]] = {
    "whole": ({}, False, None),
    "stream": ({}, True, None),
    "a client that leaves": ({"decode": Script(pause_s=0.02)}, True, 2),
    "a decode leg that is cut": ({"decode": Script(fault="cut", after=5)}, True, None),
    "a decode leg that says nothing more": ({"decode": Script(fault="stall", after=5)}, True, None),
    "a decode leg that is no answer": ({"decode": Script(fault="garbage", after=5)}, True, None),
    "a prefill leg that is cut": ({"prefill": Script(fault="cut")}, True, None),
    "a decode leg that ends in HTML": ({"decode": Script(fault="http_502_html")}, True, None),
    "a decode leg that is no HTTP": ({"decode": Script(fault="no_http")}, True, None),
    "a decode pod that is full": ({"decode": Script(fault="busy")}, False, None),
    "a request that is refused": ({"decode": Script(fault="invalid")}, True, None),
}


async def test_a_closed_alarm_never_rings() -> None:
    """Not even when it is set again: a leg's last news may come after its request's end."""
    heard: list[float] = []
    alarm = Alarm(asyncio.get_running_loop(), heard.append)
    alarm.set(0.0)
    alarm.close()
    alarm.set(0.0)
    await asyncio.sleep(0.02)
    assert heard == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", WAYS)
async def test_no_request_waits_for_a_collection(tmp_path: Path, way: str) -> None:
    """However it ended."""
    scripts, stream, pieces = WAYS[way]
    p, d, e = (ScriptedPod("p1", "prefill"), ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode"))
    async with running(tmp_path, p, d, e) as router:
        for _ in range(3):
            for kind, script in scripts.items():
                for pod in (p,) if kind == "prefill" else (d, e):
                    pod.scripts[kind] = deque([script])
            await ask(router, stream=stream, pieces=pieces)
        await until(all_freed, 3.0)


@pytest.mark.usefixtures("no_collector")
async def test_nor_does_one_that_found_no_pod(tmp_path: Path) -> None:
    """Which is what an overloaded service answers most."""
    p, d = ScriptedPod("p1", "prefill"), ScriptedPod("d1", "decode")
    async with running(tmp_path, p, d) as router:
        router.write_pods(p)
        await router.wait_ready(False)
        await ask(router, stream=True)
        await until(all_freed, 3.0)
