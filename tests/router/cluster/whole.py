"""A whole router that finds its pods by EndpointSlices, before a fake API server and scripted pods.

The API server takes no loopback address for a pod, so slices name 10.77.0.x, and the router of a test dials 127.0.0.1.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import zmq

from kvferry_router import __main__ as program
from kvferry_router.config import RouterConfig, parse_config
from kvferry_router.discovery import watch
from kvferry_router.discovery.api_server import Access
from kvferry_router.discovery.endpoints import Endpoint
from kvferry_service.curve import connect_tcp
from kvferry_wire.limits import Limits
from tests.router.harness import LIMITS, Router, until
from tests.router.scripted_pod import KEYS, MODEL, ScriptedPod

from .following import FAST
from .objects import DECODE, NAMESPACE, PREFILL, Object, make_endpoint, make_slice

QUICK = {name: getattr(LIMITS, name) for name in LIMITS.__struct_fields__} | FAST


def dial_loopback(monkeypatch: pytest.MonkeyPatch, own: bool = False) -> None:
    """Reach 127.0.0.1 in place of each pod's address; with ``own``, 127.77.0.x in place of 10.77.0.x."""

    def dialled(host: str) -> str:
        return host.replace("10.", "127.", 1) if own else "127.0.0.1"

    def connect(socket: "zmq.Socket[bytes]", host: str, port: int) -> None:
        connect_tcp(socket, dialled(host), port)

    monkeypatch.setattr(Endpoint, "url", lambda self, path: f"http://{dialled(self.host)}:{self.http}{path}")
    monkeypatch.setattr(watch, "connect_tcp", connect)


def slice_of(pod: ScriptedPod, number: int, **conditions: bool) -> Object:
    """The slice of one pod, which has ports of its own."""
    return make_slice(
        f"s-{pod.name}",
        make_endpoint(pod.name, f"10.77.0.{number}", **conditions),
        service=PREFILL if pod.role == "prefill" else DECODE,
        ports={"http": pod.port, "state": pod.state_port},
    )


def make_config(folder: Path, *flags: str, namespace: str = NAMESPACE) -> RouterConfig:
    keys = folder / "keys"
    keys.mkdir(mode=0o700, exist_ok=True)
    for name in ("http", "state", "hash"):
        path = keys / name
        path.write_text(getattr(KEYS, name).hex())
        path.chmod(0o600)
    auth = () if "--auth" in flags else ("--auth", "none")
    return parse_config(
        [
            *("--service-name", "demo", "--model-name", MODEL, "--keys-dir", str(keys), "--port", "0"),
            f"--watch-prefill={namespace}/{PREFILL}",
            f"--watch-decode={namespace}/{DECODE}",
            *("--ready-file", str(folder / "ready.json"), "--disaggregate-min-tokens", "4", *auth, *flags),
        ]
    )


@asynccontextmanager
async def running(
    folder: Path,
    access: Access | None,
    monkeypatch: pytest.MonkeyPatch,
    *flags: str,
    namespace: str = NAMESPACE,
    own_addresses: bool = False,
) -> AsyncIterator[Router]:
    """A router that asks this API server; with ``None`` the one that the environment names, as in a pod."""
    dial_loopback(monkeypatch, own_addresses)
    if access is not None:
        monkeypatch.setattr(program, "in_cluster", lambda _: access)
    config = make_config(folder, *flags, namespace=namespace)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=20))
        )
        router = Router("", session, folder)
        ready = folder / "ready.json"
        task = asyncio.create_task(program.serve(config, router.stop, Limits(**QUICK)))

        async def started() -> bool:
            return ready.exists() or task.done()

        await until(started, 5.0)
        if task.done():
            task.result()
        router.url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
        try:
            yield router
        finally:
            router.stop.set("test over")
            await task
