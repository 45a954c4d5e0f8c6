"""A client leaves at each of eight points of its request's way: both pods are free within a second.

A point that lasts milliseconds is held with SIGSTOP; the pod that is held so has its second from the moment it goes on.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvferry_router.__main__ import serve
from kvferry_router.config import parse_config
from kvferry_service.run import StopSignal
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.processes.asking import NAME, Ask
from tests.support.service import Part, Pod, Service, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

FREED_S = 1.0
SLACK_S = 0.5  # for a busy machine to be asked and to answer
LONG = "A prompt that is computed in many steps. " * 24
SHORT = "A prompt of some blocks. " * 6
ENGINES: tuple[Pod, ...] = ("prefill-0", "decode-0")


@dataclass
class Scene:
    """A request under way, and what is needed to watch it."""

    service: Service
    session: aiohttp.ClientSession
    ask: Ask
    url: str
    got: bytes = b""

    async def load(self, pod: Pod, **least: int) -> str:
        """Empty when the engine has at least so much of each."""
        found = await self.service.load(self.session, pod)
        return "" if all(getattr(found, name) >= count for name, count in least.items()) else f"{pod}: {found}"

    async def legs(self, pod: Pod) -> float:
        return (await self.service.metrics(self.session, pod))["legs"]

    async def router(self, gauge: str) -> float:
        async with self.session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"kvferry:{gauge} "))

    async def read(self) -> None:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
            session.post(self.url + "/v1/completions", json=self.ask.body()) as response,
        ):
            async for part in response.content.iter_any():
                self.got += part

    async def free(self, pods: tuple[Pod, ...] = ENGINES) -> str:
        """Empty when these engines hold nothing."""
        held = []
        for name in pods:
            load = await self.service.load(self.session, name)
            if (load.running, load.waiting, load.leases, load.free_blocks) != (0, 0, 0, load.total_blocks):
                held.append(f"{name}: {load}")
        return "; ".join(held)


Held = list[tuple[Pod, Part]]  # what is stopped when the client leaves, and goes on afterwards


async def in_prefill(scene: Scene, held: Held) -> None:
    """Prefill computes the prompt."""
    await until(lambda: scene.load("prefill-0", running=1), 10)


async def in_reply(scene: Scene, held: Held) -> None:
    """Prefill has answered and keeps the blocks; decode has not taken the leg."""
    await until(lambda: scene.load("prefill-0", leases=1), 10)


async def in_decode_queue(scene: Scene, held: Held) -> None:
    """Decode has taken the leg, and has no room for its KV."""
    await until(lambda: scene.load("decode-0", waiting=1), 10)
    await until(lambda: scene.load("prefill-0", leases=1), 2)


async def in_transfer(scene: Scene, held: Held) -> None:
    """Decode pulls, and prefill's engine does not answer it."""
    await until(lambda: scene.load("prefill-0", leases=1), 10)
    scene.service.signal("prefill-0", "engine", signal.SIGSTOP)
    held.append(("prefill-0", "engine"))
    _go_on(scene.service, "decode-0", "server")
    held.remove(("decode-0", "server"))
    await until(lambda: scene.load("decode-0", waiting=1), 10)


async def at_first_token(scene: Scene, held: Held) -> None:
    """The client has its first bytes."""

    async def why_not() -> str:
        return "" if scene.got else "nothing came"

    await until(why_not, 10)


async def in_mid_stream(scene: Scene, held: Held) -> None:
    """The client has some tens of tokens."""

    async def why_not() -> str:
        return "" if scene.got.count(b"data: ") > 30 else "not yet"

    await until(why_not, 20)


async def in_whole_answer(scene: Scene, held: Held) -> None:
    """Decode is at work on an answer that is not streamed."""
    await until(lambda: scene.load("decode-0", running=1), 10)
    assert not scene.got


def _go_on(service: Service, pod: Pod, part: Part) -> None:
    pid = service.pid(pod, part)
    assert pid is not None
    os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class Point:
    """``reach``: until the request is there; ``stop``: what is stopped from before it is sent."""

    reach: Callable[[Scene, Held], Awaitable[None]]
    prompt: str = SHORT
    stream: bool = True
    stop: tuple[tuple[Pod, Part], ...] = ()
    filled: bool = False  # decode's blocks are taken by others


POINTS = {
    "prefill": Point(in_prefill, LONG),
    "reply": Point(in_reply, stop=(("decode-0", "server"),)),
    "decode queue": Point(in_decode_queue, LONG, filled=True),
    "transfer": Point(in_transfer, stop=(("decode-0", "server"),)),
    "first token": Point(at_first_token),
    "mid-stream": Point(in_mid_stream),
    "non-stream": Point(in_whole_answer, stream=False),
}


async def leave(scene: Scene, point: Point) -> Held:
    """Ask, go to the point, and close the connection there. Returns what is still stopped."""
    held: Held = []
    for pod, part in point.stop:
        scene.service.signal(pod, part, signal.SIGSTOP)
        held.append((pod, part))
    reading = asyncio.create_task(scene.read())
    try:
        await point.reach(scene, held)
        assert not reading.done(), "the answer ended before its client could leave"
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return held


@asynccontextmanager
async def filling(scene: Scene) -> AsyncIterator[None]:
    """Two answers that hold so many of decode's blocks that a third long prompt has no room, while the block lasts."""
    tasks = []
    try:
        for number in (1, 2):
            ask = Ask(f"filler {number}: {LONG}", max_tokens=600)
            tasks.append(asyncio.create_task(Scene(scene.service, scene.session, ask, scene.url).read()))
            await until(lambda number=number: scene.load("decode-0", running=number), 20)  # type: ignore[misc]
        await until(lambda: scene.free(("prefill-0",)), 5)
        yield
        assert not any(task.done() for task in tasks), "an answer ended that was to hold the blocks"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("name", POINTS)
async def test_both_pods_are_free_within_a_second(service: Service, internal: aiohttp.ClientSession, name: str) -> None:
    """Those that run are free a second after the client has left; one that was stopped, a second after it goes on."""
    point = POINTS[name]
    ask = Ask(f"{name}: {point.prompt}", max_tokens=400, stream=point.stream)
    scene = Scene(service, internal, ask, service.url())
    if point.filled:
        await _leaves_the_queue(scene, point)
        return
    held: Held = [*point.stop]
    try:
        held = await leave(scene, point)
        stopped_pods = {pod for pod, _ in held}
        running = tuple(pod for pod in ENGINES if pod not in stopped_pods)
        await until(lambda: scene.free(running), FREED_S + SLACK_S)
    finally:
        for pod, part in held:
            _go_on(service, pod, part)
    await until(lambda: scene.free(), FREED_S + SLACK_S)
    await service.wait_idle(internal, 2.0)


async def _leaves_the_queue(scene: Scene, point: Point) -> None:
    """Beside answers that go on: the lease of the one that left is gone, and so is its leg."""
    async with filling(scene):
        await leave(scene, point)

        async def why_not() -> str:
            load, legs = await scene.service.load(scene.session, "decode-0"), await scene.legs("decode-0")
            return "" if (load.running, load.waiting, legs) == (2, 0, 2) else f"{legs} legs, {load}"

        await until(why_not, FREED_S + SLACK_S)
        await until(lambda: scene.free(("prefill-0",)), SLACK_S)
    await scene.service.wait_idle(scene.session, FREED_S + SLACK_S)


async def test_router_queue(service: Service, internal: aiohttp.ClientSession, tmp_path: Path) -> None:
    """With one place at the router, who waits and leaves costs no pod a leg, and its place in the queue is free."""
    limits = msgspec.structs.replace(DEFAULT_LIMITS, inflight=1, queue_wait_s=20.0)
    config = parse_config(
        [
            *("--service-name", "queue", "--model-name", NAME, "--pods-file", str(service.state.pods_file)),
            *("--keys-dir", str(service.state.router_keys), "--port", "0", "--auth", "none"),
            *("--ready-file", str(tmp_path / "ready.json"), "--disaggregate-min-tokens", "32"),
        ]
    )
    stop = StopSignal()
    router = asyncio.create_task(serve(config, stop, limits))
    try:
        url = await _listening(tmp_path / "ready.json", internal)
        first = Scene(service, internal, Ask(f"first: {SHORT}", max_tokens=800), url)
        second = Scene(service, internal, Ask(f"second: {SHORT}", max_tokens=10), url)
        reading = asyncio.create_task(first.read())
        await in_mid_stream(first, [])
        legs = [await first.legs(pod) for pod in ENGINES]

        async def queued(scene: Scene, held: Held) -> None:
            async def why_not() -> str:
                return "" if await scene.router("router_requests_queued") == 1 else "nobody waits"

            await until(why_not, 5)

        await leave(second, Point(queued))

        async def why_not_gone() -> str:
            return "" if await first.router("router_requests_queued") == 0 else "it still waits"

        await until(why_not_gone, FREED_S)
        assert [await first.legs(pod) for pod in ENGINES] == legs
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: first.free(), FREED_S + SLACK_S)
    finally:
        stop.set("test over")
        await router


async def _listening(ready: Path, session: aiohttp.ClientSession) -> str:
    def url() -> str:
        return f"http://127.0.0.1:{json.loads(ready.read_text())['port']}" if ready.exists() else ""

    async def why_not() -> str:
        if not (found := url()):
            return "it does not listen"
        async with session.get(found + "/readyz") as response:
            return "" if response.status == 200 else await response.text()

    await until(why_not, 20)
    return url()
