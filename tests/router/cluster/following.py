"""``ClusterPods`` before a fake API server, and what it has told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from kvferry_router.discovery.api_server import ApiServer
from kvferry_router.discovery.cluster import ClusterPods, PoolServices
from kvferry_router.discovery.endpoints import Endpoint
from kvferry_router.metrics import RouterMetrics
from kvferry_service.metrics import make_registry
from kvferry_wire.limits import Limits

from .fake_api import FakeApi
from .objects import DECODE, NAMESPACE, PREFILL

SERVICES = PoolServices(NAMESPACE, PREFILL, DECODE)
FAST: dict[str, Any] = {
    "api_reply_s": 0.5,
    "api_silence_s": 0.6,
    "api_backoff_s": 0.05,
    "api_backoff_cap_s": 0.2,
    "api_away_s": 0.4,
    "api_spacing_s": 0.02,
    "connect_timeout_s": 0.5,
}


class Following:
    """What discovery has told so far."""

    def __init__(self, discovery: ClusterPods, metrics: RouterMetrics) -> None:
        self.discovery = discovery
        self.metrics = metrics
        self.told: list[tuple[Endpoint, ...]] = []

    def pods(self) -> dict[str, str]:
        """Why each pod is withheld, as told last."""
        return {pod.name: pod.withheld for pod in self.told[-1]} if self.told else {}

    def failures(self, reason: str) -> float:
        value = self.metrics.registry.get_sample_value("kvferry:router_discovery_failures_total", {"reason": reason})
        return value or 0.0

    async def until(self, true: Callable[[], object], seconds: float = 3.0) -> float:
        """Wait for a condition; returns how long it took."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while not true():
            assert loop.time() - begun < seconds, f"not within {seconds} s: {self.pods()}"
            await asyncio.sleep(0.005)
        return loop.time() - begun


@asynccontextmanager
async def following(api: FakeApi, **limits: Any) -> AsyncIterator[Following]:
    """Follow it until the end of the block; the API server is stopped with it."""
    chosen = Limits(**(FAST | limits))
    metrics = RouterMetrics(make_registry())
    client = ApiServer(api.access, chosen, "kvferry-router/test")
    discovery = ClusterPods(client, SERVICES, family=4, limits=chosen, metrics=metrics, rng=Random(3))
    found = Following(discovery, metrics)
    task = asyncio.create_task(discovery.follow(found.told.append))
    try:
        yield found
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.stop()
