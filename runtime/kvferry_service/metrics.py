"""Metrics: a registry per process, its exposition, and labels whose number of values is bounded.

``docs/metrics.md`` lists the names and their vLLM counterparts.
"""

from collections.abc import Sequence

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

PREFIX = "kvferry:"

# Seconds. The steps follow what serving dashboards of the field use.
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.75, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 600.0)


def make_registry() -> CollectorRegistry:
    """A registry with the figures of the process itself (CPU, memory, descriptors)."""
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves it untyped
    registry = CollectorRegistry(auto_describe=True)
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)
    return registry


def counter(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """A counter ``kvferry:<name>_total``."""
    return Counter(PREFIX + name, text, labels, registry=registry)


def gauge(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    """A gauge ``kvferry:<name>``."""
    return Gauge(PREFIX + name, text, labels, registry=registry)


def histogram(registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float]) -> Histogram:
    """A histogram ``kvferry:<name>``."""
    return Histogram(PREFIX + name, text, buckets=tuple(buckets), registry=registry)


class BoundedLabel:
    """At most ``limit`` values of a label; every further one is counted under ``other``."""

    def __init__(self, limit: int, known: Sequence[str] = ()) -> None:
        self._limit = limit
        self._seen = set(known)

    def value(self, raw: str) -> str:
        if raw in self._seen:
            return raw
        if len(self._seen) >= self._limit:
            return "other"
        self._seen.add(raw)
        return raw


def add_metrics_route(app: web.Application, registry: CollectorRegistry) -> None:
    """Serve ``/metrics`` in the Prometheus text format."""

    async def metrics(_: web.Request) -> web.Response:
        body = prometheus_client.generate_latest(registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app.router.add_get("/metrics", metrics)
