"""A whole router in the test's event loop, before scripted pods, with short deadlines."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvferry_router.__main__ import serve
from kvferry_router.config import RouterConfig, parse_config
from kvferry_service.run import StopSignal
from kvferry_wire.limits import Limits

from .scripted_pod import KEYS, MODEL, ScriptedPod

LIMITS = Limits(
    stall_timeout_s=0.4,
    pod_poll_s=0.05,
    pod_reply_s=0.3,
    client_stall_s=1.0,
    capacity_wait_s=0.3,
    end_grace_s=0.1,
    queue_wait_s=0.3,
    connect_timeout_s=0.5,
    resume_wait_s=0.6,
    resume_pause_s=0.02,
    resume_longest_pause_s=0.1,
)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Until a condition holds; asked again and again, since what it looks at is another part's state."""
    async with asyncio.timeout(timeout_s):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.01)


class Router:
    """The running router and an HTTP client to it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, folder: Path) -> None:
        self.url = url
        self.session = session
        self.folder = folder
        self.stop = StopSignal()

    def write_pods(self, *pods: ScriptedPod) -> None:
        content = msgspec.json.encode({"pods": [pod.endpoint() for pod in pods]})
        draft = self.folder / ".pods.json"
        draft.write_bytes(content)
        draft.replace(self.folder / "pods.json")

    def complete(self, prompt: str = "hello", **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": len(prompt)} | fields
        return self.session.post(self.url + "/v1/completions", json=body)

    def chat(self, content: str = "hello", **fields: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 32} | fields
        return self.session.post(self.url + "/v1/chat/completions", json=body)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; zero when there is none."""
        async with self.session.get(self.url + "/metrics") as response:
            text = await response.text()
        total = 0.0
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == f"kvferry:{name}" and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total

    async def wait_ready(self, ready: bool = True, timeout_s: float = 5.0) -> None:
        async def told() -> bool:
            async with self.session.get(self.url + "/readyz") as response:
                return (response.status == 200) == ready

        await until(told, timeout_s)

    async def wait_pods(self, count: int, timeout_s: float = 5.0) -> None:
        """Until this many pods are usable."""

        async def counted() -> bool:
            return await self.metric("router_pods", state="ready") == count

        await until(counted, timeout_s)

    async def decisions(self) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {KEYS.bearer()}"}
        async with self.session.get(self.url + "/internal/v1/decisions", headers=headers) as response:
            assert response.status == 200
            found: list[dict[str, Any]] = (await response.json())["decisions"]
            return found


def make_config(folder: Path, *flags: str) -> RouterConfig:
    keys = folder / "keys"
    keys.mkdir(mode=0o700, exist_ok=True)
    for name in ("http", "state", "hash"):
        path = keys / name
        path.write_text(getattr(KEYS, name).hex())
        path.chmod(0o600)
    return parse_config(
        [
            *("--service-name", "svc", "--model-name", MODEL, "--pods-file", str(folder / "pods.json")),
            *("--keys-dir", str(keys), "--port", "0", "--auth", "none", "--ready-file", str(folder / "ready.json")),
            *("--disaggregate-min-tokens", "4", "--drain", "0.2", *flags),
        ]
    )


@asynccontextmanager
async def running(
    folder: Path, *pods: ScriptedPod, flags: tuple[str, ...] = (), limits: Limits = LIMITS, wait: bool = True
) -> AsyncIterator[Router]:
    """Start the pods and a router before them; stop all at the end."""
    async with AsyncExitStack() as stack:
        for pod in pods:
            await pod.start()
            stack.push_async_callback(pod.stop)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=20))
        )
        router = Router("", session, folder)
        router.write_pods(*pods)
        task = asyncio.create_task(serve(make_config(folder, *flags), router.stop, limits))
        ready = folder / "ready.json"

        async def started() -> bool:
            return ready.exists() or task.done()

        await until(started, 5.0)
        if task.done():
            task.result()
        router.url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
        try:
            if wait:
                await router.wait_pods(len(pods))
            yield router
        finally:
            router.stop.set("test over")
            await task


def events(body: bytes) -> list[Any]:
    """The events of a stream, each checked to be one whole document; ``[DONE]`` as a string."""
    found: list[Any] = []
    for block in body.decode("utf-8").split("\n\n"):
        if not block or block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        assert "\n" not in data
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def text_of(body: bytes) -> str:
    """The text of a completion's stream."""
    documents = [event for event in events(body) if event != "[DONE]"]
    return "".join(document["choices"][0]["text"] for document in documents if document.get("choices"))
