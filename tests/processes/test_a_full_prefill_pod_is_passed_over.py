"""A prefill pod whose leases hold their share says that it is busy: the router asks another, or decode alone, or waits.

The leases that fill a pod are those of readers that have not come yet: legs sent to it by hand, read by nobody.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvferry_wire.frames import Fail, Prefilled
from kvferry_wire.leg import AbortRequest, Leg
from tests.processes.asking import said
from tests.runtime.server.harness import PodProcess, frames, freed_within, load_of, make_leg, running_pod
from tests.support.router_process import RouterProcess, running_router
from tests.support.service import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

# 16 of 32 blocks may be leased: one prompt of 11 blocks is, a second of 11 is not.
BLOCKS, PROMPT = 32, "A prompt of eleven blocks, which leaves no room for another one of its size. " * 2 + "And so on."
TOKENS = 8
DEADLINE_S = 24.0  # a quarter of it is what a request may wait for prefill


@dataclass
class Pods:
    """Two prefill pods and a decode pod, and the legs whose leases fill the former."""

    by_name: dict[str, PodProcess]
    held: dict[str, Leg] = field(default_factory=dict)
    count: int = 0

    async def fill(self, name: str) -> None:
        """Take up what this pod may lease out; the next prompt of the size is refused."""
        self.count += 1
        async with self.by_name[name].client() as client:
            leg = make_leg(f"fill {self.count}", prompt=f"{self.count:04d}{PROMPT}"[: len(PROMPT)])
            assert isinstance((await frames(client, "prefill", leg))[-1], Prefilled)
            self.held[name] = leg
            refused = make_leg(f"over {self.count}", prompt=f"{self.count + 5000}{PROMPT}"[: len(PROMPT)])
            answer = (await frames(client, "prefill", refused))[-1]
            assert isinstance(answer, Fail) and answer.kind == "busy"

    async def free(self, name: str) -> None:
        """Give the lease back, as a router does that does not use it."""
        leg = self.held.pop(name)
        async with self.by_name[name].client() as client:
            body = msgspec.msgpack.encode(AbortRequest(internal_id=leg.internal_id, attempt=leg.attempt))
            async with client.post("/internal/v1/abort", data=body) as response:
                assert response.status == 204
            await freed_within(client, 2.0)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    folder = tmp_path_factory.mktemp("full")
    flags = ("--kv-blocks", str(BLOCKS), "--lease", "60")
    with (
        running_pod(folder / "p0", "--role", "prefill", *flags) as first,
        running_pod(folder / "p1", "--role", "prefill", *flags, keys=first.keys) as second,
        running_pod(folder / "d", "--role", "decode", "--kv-blocks", "256", "--lease", "60", keys=first.keys) as decode,
    ):
        yield Pods({"p0": first, "p1": second, "d": decode})


@pytest.fixture
async def pods(started: Pods) -> AsyncIterator[Pods]:
    """All empty, before and after."""
    yield started
    async with AsyncExitStack() as stack:
        for name in tuple(started.held):
            await started.free(name)
        for pod in started.by_name.values():
            await freed_within(await stack.enter_async_context(pod.client()), 3.0)


@asynccontextmanager
async def router_over(pods: Pods, folder: Path, policy: str) -> AsyncIterator[RouterProcess]:
    """A router that uses all three."""
    keys = pods.by_name["p0"].keys
    assert keys is not None
    flags = ("--disaggregate-min-tokens", "16", "--transfer-failure", policy, "--request-deadline", f"{DEADLINE_S:g}")
    with running_router(folder, keys, *flags) as router:
        roles = {"p0": "prefill", "p1": "prefill", "d": "decode"}
        router.name_pods(**{name: pod.ready() | {"role": roles[name]} for name, pod in pods.by_name.items()})

        async def why_not() -> str:
            used = [value for series, value in (await metrics(router)).items() if '"ready"' in series]
            return "" if sum(used) == 3 else f"it uses {sum(used):g} pods"

        await until(why_not, 20.0)
        yield router


async def metrics(router: RouterProcess) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(router.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [line.removeprefix("kvferry:").rpartition(" ") for line in lines if line.startswith("kvferry:router_")]
    return {series: float(value) for series, _, value in found if "router_pods" in series or "failures" in series}


async def ask(router: RouterProcess, mark: str) -> tuple[int, str, str]:
    """Status, the path that the answer took, and its text."""
    prompt = f"{mark}: {PROMPT}"[: len(PROMPT)]
    body = {"model": "toy", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    async with (
        aiohttp.ClientSession() as session,
        session.post(router.url + "/v1/completions", json=body) as response,
    ):
        document = await response.json()
        if response.status == 200:
            text = document["choices"][0]["text"]
            assert text == said(prompt, TOKENS)
        else:
            text = document["error"]["message"]
        return response.status, response.headers.get("x-kvferry-path", ""), text


async def test_another_prefill_pod_is_taken(pods: Pods, tmp_path: Path) -> None:
    """Whichever of the two is full, every request is computed by the other one, and ferried."""
    async with router_over(pods, tmp_path, "recompute") as router:
        for full in ("p0", "p1"):
            await pods.fill(full)
            for number in range(3):
                status, path, _ = await ask(router, f"{full} {number}")
                assert (status, path) == (200, "disaggregated")
            await pods.free(full)


async def test_decode_computes_alone_when_all_are_full(pods: Pods, tmp_path: Path) -> None:
    """By default no request waits for KV that decode can compute: the answer says how it came about."""
    async with router_over(pods, tmp_path, "recompute") as router:
        for name in ("p0", "p1"):
            await pods.fill(name)
        status, path, _ = await ask(router, "alone")
        assert status == 200
        assert path != "disaggregated"
        await pods.free("p1")
        assert (await ask(router, "again"))[:2] == (200, "disaggregated")


async def test_a_service_that_insists_waits_for_a_lease_to_end(pods: Pods, tmp_path: Path) -> None:
    """Nothing is computed at decode; as soon as a pod has room again the request goes on, and its KV is ferried."""
    async with router_over(pods, tmp_path, "retry") as router:
        for name in ("p0", "p1"):
            await pods.fill(name)
        waiting = asyncio.create_task(ask(router, "waits"))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        async with pods.by_name["d"].client() as decode:
            assert (await load_of(decode)).running == 0
        await pods.free("p0")
        async with asyncio.timeout(4.0):
            assert (await waiting)[:2] == (200, "disaggregated")


async def test_a_service_that_must_ferry_says_that_it_is_full(pods: Pods, tmp_path: Path) -> None:
    """After the wait: 429, as any full service; then, with room again, an answer."""
    async with router_over(pods, tmp_path, "fail") as router:
        for name in ("p0", "p1"):
            await pods.fill(name)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        status, _, _ = await ask(router, "refused")
        assert status == 429
        assert DEADLINE_S / 8 < loop.time() - begun < DEADLINE_S / 2
        await pods.free("p1")
        assert (await ask(router, "taken"))[:2] == (200, "disaggregated")
