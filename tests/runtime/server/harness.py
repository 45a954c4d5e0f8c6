"""A real pod (API server and EngineCore processes) with the toy model, and legs for it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from kvferry_service.key_files import create_keys, load_keys
from kvferry_wire import state
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import Frame, FrameDecoder
from kvferry_wire.leg import AbortRequest, AnswerFormat, ChoiceState, Leg, Sampling

START_S = 60.0


class PodProcess:
    """A running pod. ``pid`` is the API server's."""

    def __init__(self, process: "subprocess.Popen[bytes]", ready_file: Path, log: Path, keys: Path | None) -> None:
        self.process = process
        self.ready_file = ready_file
        self.log = log
        self.keys = keys
        self.bearer = "" if keys is None else load_keys(keys, need_kv=True).bearer()

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.ready_file.read_text())
        return content

    @property
    def engine_pid(self) -> int:
        return int(self.ready()["engine_pid"])

    @property
    def url(self) -> str:
        ready = self.ready()
        host = ready["host"]
        return f"http://{f'[{host}]' if ':' in host else host}:{ready['http']}"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[aiohttp.ClientSession]:
        headers = {"Authorization": f"Bearer {self.bearer}"} if self.bearer else {}
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(self.url, headers=headers, connector=connector) as session:
            yield session


@contextmanager
def running_pod(
    folder: Path, *flags: str, model: str = "toy", keys: Path | None = None, with_keys: bool = True, port: int = 0
) -> Iterator[PodProcess]:
    """Start a pod and wait until it is ready; afterwards stop it and check that nothing is left."""
    folder.mkdir(parents=True, exist_ok=True)
    if with_keys and keys is None:
        keys = folder / "keys"
        create_keys(keys)
    ready_file, log = folder / "ready.json", folder / "log"
    argv = [sys.executable, "-m", "kvferry_runtime.server", "--model", model, "--port", str(port), "--threads", "1"]
    argv += ["--ready-file", str(ready_file), *flags]
    if keys is not None:
        argv += ["--keys-dir", str(keys)]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    pod = PodProcess(process, ready_file, log, keys)
    try:
        until(lambda: ready_file.exists() or process.poll() is not None, START_S)
        assert process.poll() is None, log.read_text()
        yield pod
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        gone, alive = psutil.wait_procs(children, 5)
        for child in alive:
            child.kill()
        assert not alive, f"left behind: {alive}; {len(gone)} ended"


def until(true: Callable[[], object], seconds: float) -> None:
    """Wait for a condition of another process. Fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


async def until_seen(true: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Wait for a condition that takes a request to see. Fails after ``seconds``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not await true():
        assert loop.time() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.02)


def make_leg(internal_id: str = "leg-1", prompt: str = "hello world", **changes: Any) -> Leg:
    """A first leg over a prompt of bytes; ``n``, ``emitted``, ``sampling`` and ``format`` change those parts."""
    count = changes.pop("n", 1)
    emitted = changes.pop("emitted", ((),) * count)
    sampling = {"seed": 7, "max_tokens": 16, "temperature": 0.0} | changes.pop("sampling", {})
    answer = {
        "kind": "completion",
        "stream": True,
        "include_usage": False,
        "response_id": "cmpl-1",
        "created": 1,
        "model": "toy",
    } | changes.pop("format", {})
    values: dict[str, Any] = {
        "internal_id": internal_id,
        "attempt": 0,
        "request_id": "req-1",
        "deadline_ms": 30_000,
        "prompt_ids": tuple(prompt.encode()),
        "choices": tuple(ChoiceState(emitted=tuple(ids)) for ids in emitted),
        "sampling": Sampling(**sampling),
        "format": AnswerFormat(**answer),
        "extras": KeyExtras(),
    }
    return Leg(**(values | changes))


async def frames(client: aiohttp.ClientSession, kind: str, leg: Leg) -> list[Frame]:
    """All frames of a leg."""
    found: list[Frame] = []
    async for frame in frame_stream(client, kind, leg):
        found.append(frame)
    return found


async def frame_stream(client: aiohttp.ClientSession, kind: str, leg: Leg) -> AsyncIterator[Frame]:
    """A leg's frames as they come; closing the iterator closes the connection."""
    decoder = FrameDecoder()
    async with client.post(f"/internal/v1/{kind}", data=msgspec.msgpack.encode(leg)) as response:
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            for frame in decoder.feed(chunk):
                yield frame
        assert decoder.pending_bytes == 0


async def load_of(client: aiohttp.ClientSession) -> state.Load:
    """The pod's load now, from a snapshot that the engine makes between two steps."""
    async with client.get("/internal/v1/state") as response:
        assert response.status == 200, await response.text()
        return state.decode_snapshot(await response.read()).load


async def load_becomes(client: aiohttp.ClientSession, wanted: Callable[[state.Load], bool], seconds: float) -> None:
    """Wait until the pod's load is as wanted. Fails after ``seconds`` with the load that there is."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not wanted(load := await load_of(client)):
        assert loop.time() < deadline, f"still after {seconds} s: {load}"
        await asyncio.sleep(0.02)


async def busy_with(client: aiohttp.ClientSession, legs: int, seconds: float = 5.0) -> None:
    """Wait until so many legs run or wait for their turn."""
    await load_becomes(client, lambda load: load.running + load.waiting >= legs, seconds)


async def freed_within(client: aiohttp.ClientSession, seconds: float) -> None:
    """Fails unless the pod holds no sequence, no request and no block within so many seconds."""
    await load_becomes(
        client,
        lambda load: (load.running, load.waiting, load.leases, load.free_blocks) == (0, 0, 0, load.total_blocks),
        seconds,
    )


async def abort(client: aiohttp.ClientSession, leg: Leg) -> None:
    """End this attempt by name, as a router does."""
    body = msgspec.msgpack.encode(AbortRequest(internal_id=leg.internal_id, attempt=leg.attempt))
    async with client.post("/internal/v1/abort", data=body) as response:
        assert response.status == 204, await response.text()


def alive(pid: int) -> bool:
    """Whether a process runs (one that ended and was not waited for does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int, signal_number: int) -> None:
    os.kill(pid, signal_number)
