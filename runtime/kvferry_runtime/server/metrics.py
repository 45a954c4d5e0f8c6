"""The pod's metrics: what the server counts itself, and the engine's latest heartbeat as gauges and counters.

Names and rules: ``docs/metrics.md``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry_runtime.engine.client import EngineClient
from kvferry_service.metrics import (
    FIRST_TOKEN_BUCKETS,
    PER_TOKEN_BUCKETS,
    PREFIX,
    REQUEST_BUCKETS,
    BoundedLabel,
    counter,
    histogram,
    make_registry,
)

_REASONS = 32  # values of a reason label


@dataclass(slots=True)
class LegClock:
    """When things happened to one leg; seconds of the loop's clock."""

    kind: str
    started: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    counted_prompt: bool = False
    finished: set[int] = field(default_factory=set)


class PodMetrics:
    """One per API server. No call of it raises for values that a leg can carry."""

    def __init__(self, engine: EngineClient, registry: CollectorRegistry | None = None) -> None:
        self.registry = make_registry() if registry is None else registry
        self.registry.register(_EngineCollector(engine))
        reg = self.registry
        self._first = histogram(
            reg, "time_to_first_token_seconds", "From a leg's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._per_token = histogram(
            reg, "time_per_output_token_seconds", "Mean time between a leg's tokens after the first.", PER_TOKEN_BUCKETS
        )
        self._latency = histogram(
            reg, "e2e_request_latency_seconds", "From a generate leg's arrival to its end.", REQUEST_BUCKETS
        )
        self._prefill = histogram(
            reg, "request_prefill_leg_seconds", "From a prefill leg's arrival to its answer.", REQUEST_BUCKETS
        )
        self._prompt = counter(reg, "prompt_tokens", "Prompt tokens of legs whose prompt was prefilled here.")
        self._generated = counter(reg, "generation_tokens", "Tokens picked here.")
        self._queries = counter(reg, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter(reg, "prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._success = counter(reg, "request_success", "Legs that ended, by why.", ("finished_reason",))
        self._failed = counter(reg, "leg_failures", "Legs that ended without an answer, by kind.", ("kind",))
        self._recomputed = counter(
            reg, "kv_recomputed", "Legs that came with a handle and computed their prompt here, by reason.", ("reason",)
        )
        self._moved = counter(reg, "legs_moved", "Running legs that left with their KV under a lease.")
        self._reasons = BoundedLabel(_REASONS)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(reason)

    def started(self, kind: str, now: float) -> LegClock:
        return LegClock(kind=kind, started=now)

    def prompt_done(self, clock: LegClock, prompt: int, cached: int, *, pulled: bool) -> None:
        """A leg's prompt is in KV: once per leg. A pulled prompt was counted where it was prefilled."""
        if clock.counted_prompt:
            return
        clock.counted_prompt = True
        if not pulled:
            self._prompt.inc(prompt)
            self._queries.inc(prompt)
            self._hits.inc(min(cached, prompt))

    def tokens(self, clock: LegClock, count: int, now: float) -> None:
        """Tokens of a leg have arrived."""
        if not count:
            return
        if clock.first is None:
            clock.first = now
            self._first.observe(now - clock.started)
        clock.last = now
        clock.tokens += count
        self._generated.inc(count)

    def recomputed(self, reason: str) -> None:
        self._recomputed.labels(self._reasons.value(reason)).inc()

    def ended(self, clock: LegClock, reasons: Iterable[str], now: float) -> None:
        """A leg has its right end; one reason per choice."""
        for reason in reasons:
            self._success.labels(reason).inc()
        if clock.kind == "prefill":
            self._prefill.observe(now - clock.started)
            return
        self._latency.observe(now - clock.started)
        if clock.first is not None and clock.last is not None and clock.tokens > 1:
            self._per_token.observe((clock.last - clock.first) / (clock.tokens - 1))

    def moved(self) -> None:
        """A leg ended with ``Handoff``."""
        self._moved.inc()

    def abandoned(self) -> None:
        """A leg's connection ended before its answer did."""
        self._success.labels("abort").inc()

    def failed(self, kind: str) -> None:
        """A leg ended with ``Fail``."""
        self._failed.labels(kind).inc()
        self._success.labels("abort" if kind == "cancelled" else "error").inc()


class _EngineCollector(Collector):
    """The engine's own figures. Its counters start over with a new incarnation, as a scraper expects of a restart."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        engine, load, stats = self._engine, self._engine.load, self._engine.stats
        yield _gauge("engine_starts", "EngineCore processes started by this server.", engine.starts)
        yield _gauge("engine_ready", "Whether the EngineCore would take a leg now.", int(not engine.not_ready()))
        yield _gauge("legs", "Legs that the server waits for.", engine.running())
        if load is not None:
            used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
            yield _gauge("num_requests_running", "Sequences in the running batch.", load.running)
            yield _gauge("num_requests_waiting", "Requests that wait, for KV of others too.", load.waiting)
            yield _gauge("queued_tokens", "Input tokens of waiting requests not computed yet.", load.queued_tokens)
            yield _gauge("kv_cache_usage_perc", "Share of the KV blocks that are referenced, 0 to 1.", used)
            yield _gauge("kv_blocks_total", "Usable KV blocks.", load.total_blocks)
            yield _gauge("kv_blocks_free", "KV blocks without a reference.", load.free_blocks)
            yield _gauge("kv_leases", "Leases that keep blocks.", load.leases)
            yield _gauge("draining", "Whether the pod takes nothing new.", int(load.draining))
        yield _counter("num_preemptions", "Sequences that lost their blocks to another.", stats.preemptions)
        yield _counter("engine_steps", "Steps computed.", stats.steps)
        yield _counter("engine_step_tokens", "Input tokens of all steps.", stats.step_tokens)
        yield _counter("engine_step_seconds", "Seconds spent in steps.", stats.step_seconds)
        yield _counter("kv_events", "Changes of the prefix cache sent on the state stream.", stats.kv_events)
        yield _counter("state_messages_dropped", "State messages that the socket did not take.", stats.state_dropped)
        yield _gauge("kv_pulls", "Pulls in flight.", stats.pulls)
        yield _gauge("kv_peers", "Engines with a valid handshake.", stats.peers)
        yield _counter("kv_pulls_ok", "Pulls whose blocks were valid.", stats.pulls_ok)
        yield _counter("kv_pulled_bytes", "Bytes of valid pulls.", stats.pulled_bytes)
        yield _counter("kv_pull_seconds", "Seconds of valid pulls.", stats.pull_seconds)
        yield _counter("kv_sent_bytes", "Bytes sent to readers.", stats.sent_bytes)
        yield _counter("kv_leases_granted", "Leases granted.", stats.leases_granted)
        yield _labelled("kv_pulls_failed", "Pulls that failed, by reason.", "reason", stats.pulls_failed)
        yield _labelled("kv_leases_ended", "Leases ended, by why.", "why", stats.leases_ended)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in sorted(values.items())[:_REASONS]:
        family.add_metric([value], count)
    return family
