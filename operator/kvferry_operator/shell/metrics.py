"""The operator's metrics. No label holds a service's name: their number is not bounded."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from kvferry_service.metrics import counter, gauge, histogram

PASS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Read when somebody asks for them (``measure``).
GAUGES = {
    "operator_leader": "1 while this process works",
    "operator_queue_waiting": "Services that are due",
    "operator_queue_running": "Services in work",
    "operator_queue_failing": "Services whose last pass failed",
    "operator_services": "Services seen",
    "operator_objects": "Objects held in memory",
}


class OperatorMetrics:
    """All of them, on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._calls = counter(
            registry, "operator_api_calls", "Calls of the API but for watches", ("verb", "kind", "code")
        )
        self._watches = counter(registry, "operator_watch_requests", "Lists and watches begun", ("kind", "verb"))
        self._passes = histogram(registry, "operator_pass_seconds", "Time of one pass over a service", PASS_BUCKETS)
        self._failed = counter(registry, "operator_passes_failed", "Passes that are tried again")
        self.events_dropped = counter(registry, "operator_events_dropped", "Events that were not written")
        self._gauges = {name: gauge(registry, name, text) for name, text in GAUGES.items()}
        self.vanished = counter(registry, "operator_vanished_objects", "Objects found gone after a new list")

    def called(self, verb: str, kind: str, code: int) -> None:
        """A call has ended; code 0: without an answer."""
        self._calls.labels(verb, kind, str(code)).inc()

    def requested(self, kind: str, watch: bool) -> None:
        self._watches.labels(kind, "watch" if watch else "list").inc()

    def passed(self, seconds: float, failed: bool) -> None:
        self._passes.observe(seconds)
        if failed:
            self._failed.inc()

    def measure(self, name: str, value: Callable[[], float]) -> None:
        """Say how to read one of ``GAUGES``."""
        self._gauges[name].set_function(value)
