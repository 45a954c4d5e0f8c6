"""The router's metrics. Label values come from closed sets: no tenant, no pod name, no id."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvferry_service import metrics
from kvferry_service.metrics import BoundedLabel

_REASONS = 64  # recompute reasons, pods' own included


class RouterMetrics:
    """All of them, registered once per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._of_requests(registry)
        self._of_legs(registry)
        self._of_resumes(registry)
        self._of_pods(registry)
        self._of_keys(registry)

    def _of_requests(self, registry: CollectorRegistry) -> None:
        self.requests: Counter = metrics.counter(
            registry, "router_requests", "Requests that ended, by outcome and path.", ("outcome", "path")
        )
        self.first_token = metrics.histogram(
            registry,
            "router_time_to_first_token_seconds",
            "From the router's accept to the first token.",
            metrics.FIRST_TOKEN_BUCKETS,
        )
        self.between_tokens = metrics.histogram(
            registry,
            "router_inter_token_latency_seconds",
            "Between two writes of a stream, per token.",
            metrics.PER_TOKEN_BUCKETS,
        )
        self.duration = metrics.histogram(
            registry,
            "router_request_duration_seconds",
            "From the router's accept to the end of the answer.",
            metrics.REQUEST_BUCKETS,
        )
        self.inflight: Gauge = metrics.gauge(registry, "router_requests_in_flight", "Requests under way.")
        self.queued: Gauge = metrics.gauge(registry, "router_requests_queued", "Requests waiting for admission.")
        self.decisions = metrics.counter(registry, "router_decisions", "Routing decisions, by reason.", ("reason",))

    def _of_legs(self, registry: CollectorRegistry) -> None:
        self.bookings: Gauge = metrics.gauge(registry, "router_bookings", "Legs booked at pods, opened or about to be.")
        self.recomputes = metrics.counter(
            registry, "router_recomputes", "Prompts that decode computed though prefill was planned.", ("reason",)
        )
        self.recompute_reason = BoundedLabel(_REASONS)
        self.pod_failures = metrics.counter(
            registry, "router_leg_failures", "Legs that ended as no healthy pod's does.", ("kind", "reason")
        )
        self.aborts = metrics.counter(registry, "router_aborts", "Legs aborted by name.", ("confirmed",))
        self.pairs_barred: Gauge = metrics.gauge(
            registry, "router_pairs_barred", "Pairs of pods that are left alone because transfers between them fail."
        )

    def _of_resumes(self, registry: CollectorRegistry) -> None:
        self.resumes = metrics.counter(
            registry, "router_resumes", "Answers that another leg went on with, by how one was lost.", ("cause",)
        )
        self.resume_gap = metrics.histogram(
            registry,
            "router_resume_gap_seconds",
            "From what came last of an answer to what the leg that goes on with it gave first.",
            metrics.FIRST_TOKEN_BUCKETS,
        )
        self.moves = metrics.counter(
            registry,
            "router_moves_asked",
            "Running legs asked to leave pods that drain, by whether they ran.",
            ("confirmed",),
        )
        self.gave_up = metrics.counter(
            registry, "router_gave_up", "Requests that failed, by why no further pod was tried.", ("reason",)
        )
        self.resume_ids: Gauge = metrics.gauge(registry, "router_resume_ids", "Ids of running answers that are kept.")

    def _of_pods(self, registry: CollectorRegistry) -> None:
        """What is known of them, and how it is found out."""
        self.rejoins = metrics.counter(
            registry, "router_state_rejoins", "State streams joined again, by reason.", ("reason",)
        )
        self.index_blocks: Gauge = metrics.gauge(registry, "router_index_blocks", "Entries of the prefix index.")
        self.index_dropped = metrics.counter(
            registry, "router_index_dropped", "Entries left out because the index is full."
        )
        self.pods: Gauge = metrics.gauge(registry, "router_pods", "Pods, by role and state.", ("role", "state"))
        self.pods_unpaired: Gauge = metrics.gauge(
            registry, "router_pods_unpaired", "Pods that no pod of the other role shares a compat hash with.", ("role",)
        )
        self.discovery_connected: Gauge = metrics.gauge(
            registry, "router_discovery_connected", "1 while what discovery tells of the pods is up to date."
        )
        self.discovery_silence: Gauge = metrics.gauge(
            registry, "router_discovery_silence_seconds", "Since the last word of the API server; 0 without one."
        )
        self.discovery_failures = metrics.counter(
            registry, "router_discovery_failures", "Lists and watches of the API server that failed.", ("reason",)
        )
        self.discovery_left_out: Gauge = metrics.gauge(
            registry, "router_discovery_left_out", "Endpoints that are not used as pods, by reason.", ("reason",)
        )

    def _of_keys(self, registry: CollectorRegistry) -> None:
        self.api_keys: Gauge = metrics.gauge(registry, "router_api_keys", "API keys that clients may show.")
        self.api_keys_stale: Gauge = metrics.gauge(
            registry, "router_api_keys_stale", "1 while the API keys cannot be read again and the old ones stay."
        )
