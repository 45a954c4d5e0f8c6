"""A client that leaves, at whatever stage, is gone at both pods within a second."""

import asyncio
import gc
import json
from pathlib import Path

import pytest

from kvferry_router.flow_messages import ClientGone, OpenLeg
from kvferry_router.proxy import RequestRun

from .harness import Router, running, until
from .scripted_pod import Script, ScriptedPod

PROMPT = "the marker of this request"


def make_pods(prefill: Script, decode: Script) -> tuple[ScriptedPod, ScriptedPod]:
    p, d = ScriptedPod("p1", "prefill", context=8192), ScriptedPod("d1", "decode", context=8192)
    p.default["prefill"], d.default["decode"] = prefill, decode
    return p, d


async def leave(router: Router, condition: "asyncio.Future[None]", *, stream: bool, read: int = 0) -> None:
    """Ask over a raw connection, and close it once the condition is met."""
    body = json.dumps({"model": "toy", "prompt": PROMPT, "max_tokens": 26, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if read:
        await reader.readexactly(read)
    await condition
    writer.close()
    await writer.wait_closed()


STAGES = {
    "prefill": (Script(pause_s=30), Script(), "p"),
    "prefill alive": (Script(after=3, pause_s=30), Script(), "p"),
    "decode silent": (Script(), Script(fault="stall"), "d"),
    "decode slow": (Script(), Script(pause_s=0.2), "d"),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("stage", STAGES)
async def test_departure_reaches_both_pods_within_a_second(tmp_path: Path, stage: str, stream: bool) -> None:
    """The open leg's connection is closed and each leg is aborted by name, prefill's lease included."""
    prefill, decode, at = STAGES[stage]
    p, d = make_pods(prefill, decode)
    loop = asyncio.get_running_loop()
    async with running(tmp_path, p, d) as router:
        there = loop.create_future()
        client = asyncio.create_task(leave(router, there, stream=stream))
        pod, kind = (p, "prefill") if at == "p" else (d, "decode")
        await pod.wait_for(lambda: pod.running == 1)
        await asyncio.sleep(0.05)
        left_at = loop.time()
        there.set_result(None)
        await client
        await pod.wait_for(lambda: pod.broken == [kind], timeout_s=1.0)
        await p.wait_for(lambda: len(p.aborts) == 1, timeout_s=1.0)
        assert p.aborts[0].attempt == 0
        if at == "d":
            await d.wait_for(lambda: len(d.aborts) == 1, timeout_s=1.0)
            assert (d.aborts[0].internal_id, d.aborts[0].attempt) == (p.aborts[0].internal_id, 1)
        assert loop.time() - left_at < 1.0
        assert await router.metric("router_requests_in_flight") == 0
        assert await router.metric("router_requests_total", outcome="cancelled") == 1


async def test_departure_in_mid_stream(tmp_path: Path) -> None:
    """After some bytes: the decode leg ends, and prefill's lease is withdrawn."""
    p, d = make_pods(Script(), Script(pause_s=0.05))
    async with running(tmp_path, p, d) as router:
        there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        there.set_result(None)
        await leave(router, there, stream=True, read=400)
        await d.wait_for(lambda: d.broken == ["decode"] and len(d.aborts) == 1, timeout_s=1.0)
        await p.wait_for(lambda: len(p.aborts) == 1, timeout_s=1.0)


async def test_fifty_departures_leave_nothing(tmp_path: Path) -> None:
    """Closing ten milliseconds after asking, fifty times: no leg, no booking, no request under way."""
    p, d = make_pods(Script(pause_s=0.02), Script(pause_s=0.02))
    async with running(tmp_path, p, d) as router:
        for number in range(50):
            there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.002 * (number % 12), there.set_result, None)
            await leave(router, there, stream=number % 2 == 0)
        await p.wait_for(lambda: p.running == 0)
        await d.wait_for(lambda: d.running == 0)

        async def idle() -> bool:
            return await router.metric("router_requests_in_flight") == 0

        await until(idle, 1.0)
        async with router.complete(PROMPT) as response:
            assert (await response.json())["choices"][0]["text"] == PROMPT


async def test_a_leg_that_is_dropped_before_it_begins_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may leave in the very turn of the loop in which a leg is opened. (A coroutine that nobody ever runs
    would warn, which fails a test.)"""
    opened = RequestRun._open

    def open_and_leave(run: RequestRun, effect: OpenLeg) -> None:
        opened(run, effect)
        run._events.append(ClientGone())

    p, d = make_pods(Script(), Script())
    async with running(tmp_path, p, d) as router:
        monkeypatch.setattr(RequestRun, "_open", open_and_leave)
        there = asyncio.get_running_loop().create_future()
        client = asyncio.create_task(leave(router, there, stream=True))
        await p.wait_for(lambda: len(p.aborts) == 1)
        monkeypatch.undo()
        there.set_result(None)
        await client
        gc.collect()
        assert (p.legs, d.legs) == ([], [])
        async with router.complete(PROMPT) as response:
            assert (await response.json())["choices"][0]["text"] == PROMPT


async def test_client_that_does_not_read_is_cut_and_frees_the_pod(tmp_path: Path) -> None:
    """A client that takes nothing for the stall limit has left; a fast pod is not held by it meanwhile."""
    p, d = make_pods(Script(), Script())
    prompt = "x" * 3000
    async with running(tmp_path, p, d) as router:
        body = json.dumps({"model": "toy", "prompt": prompt, "max_tokens": 1000, "n": 8, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]), limit=1024)
        writer.transport.get_extra_info("socket").setsockopt(1, 8, 4096)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readexactly(100)
        await d.wait_for(lambda: len(d.legs) == 1)
        await d.wait_for(lambda: d.running == 0, timeout_s=5.0)

        async def gone() -> bool:
            return await router.metric("router_requests_in_flight") == 0

        await until(gone, 6.0)
        writer.close()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_closes_its_half_has_left(tmp_path: Path, stream: bool) -> None:
    """It sends no more, and may still read or not: nobody can tell it from one that is gone, and it is served no more.

    Both pods are free within a second, and the connection is closed from this side too.
    """
    p, d = make_pods(Script(), Script(pause_s=0.2))
    async with running(tmp_path, p, d) as router:
        body = json.dumps({"model": "toy", "prompt": PROMPT, "max_tokens": 26, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await d.wait_for(lambda: d.running == 1)
        writer.write_eof()
        await d.wait_for(lambda: d.broken == ["decode"] and len(d.aborts) == 1, timeout_s=1.0)
        await p.wait_for(lambda: len(p.aborts) == 1, timeout_s=1.0)
        async with asyncio.timeout(2.0):
            rest = await reader.read()
        assert b"[DONE]" not in rest
        assert b'finish_reason":"stop' not in rest
        writer.close()

        async def idle() -> bool:
            return await router.metric("router_requests_in_flight") == 0

        await until(idle, 1.0)
        assert await router.metric("router_requests_total", outcome="cancelled") == 1
