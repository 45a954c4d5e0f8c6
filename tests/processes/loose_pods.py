"""Pods of both roles that nobody starts again, and a router over them with a wait that a test can sit out."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import msgspec

from kvferry_router.__main__ import serve
from kvferry_router.config import parse_config
from kvferry_service.key_files import create_keys
from kvferry_service.run import StopSignal
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.processes.asking import NAME
from tests.runtime.server.harness import PodProcess, running_pod
from tests.support.router_process import write_pods
from tests.support.service import until


@contextmanager
def running_pods(folder: Path, count: int, *flags: str) -> Iterator[list[PodProcess]]:
    """Pods of both roles, of one service, that nobody starts again."""
    keys = folder / "keys"
    create_keys(keys)
    flags = ("--kv-blocks", "600", "--max-model-len", "2048", *flags)
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_pod(folder / f"b{n}", *flags, model="toy:step_ms=10", keys=keys))
            for n in range(count)
        ]


@asynccontextmanager
async def router_of(folder: Path, pods: list[PodProcess]) -> AsyncIterator[str]:
    """A router over these pods that looks for another one for a second only."""
    ready = [pod.ready() for pod in pods]
    entries = [
        {"name": f"b{n}", "role": "both", "host": "127.0.0.1", "http": found["http"], "state": found["state"]}
        for n, found in enumerate(ready)
    ]
    write_pods(folder, entries)
    config = parse_config(
        [
            *("--service-name", "short", "--model-name", NAME, "--pods-file", str(folder / "pods.json")),
            *("--keys-dir", str(folder / "keys"), "--port", "0", "--auth", "none"),
            *("--ready-file", str(folder / "router.json")),
        ]
    )
    stop = StopSignal()
    limits = msgspec.structs.replace(DEFAULT_LIMITS, resume_wait_s=1.0)
    router = asyncio.create_task(serve(config, stop, limits))
    try:
        url = await _uses(folder / "router.json", len(pods))
        yield url
    finally:
        stop.set("test over")
        await router


async def _uses(ready: Path, pods: int) -> str:
    """The router's URL, once it uses so many pods."""

    def url() -> str:
        return f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"

    async def listens() -> str:
        return "" if await asyncio.to_thread(ready.exists) else "it does not listen"

    async def why_not() -> str:
        async with aiohttp.ClientSession() as session, session.get(url() + "/metrics") as response:
            lines = (await response.text()).splitlines()
        used = [line for line in lines if line.startswith("kvferry:router_pods{") and 'state="ready"' in line]
        found = sum(float(line.rpartition(" ")[2]) for line in used)
        return "" if found == pods else f"it uses {found:g} pods"

    await until(listens, 20)
    await until(why_not, 20)
    return url()


async def legs_of(pod: PodProcess, least: int) -> int:
    """How many legs the pod has, once it has so many."""
    found = 0

    async def why_not() -> str:
        nonlocal found
        async with pod.client() as client, client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        found = int(next(float(line.split()[1]) for line in lines if line.startswith("kvferry:legs ")))
        return "" if found >= least else f"{found} legs"

    await until(why_not, 20)
    return found
