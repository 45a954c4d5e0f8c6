"""The command line, ports and environment of the router."""

from kvferry_operator.api.quantities import format_seconds, parse_duration
from kvferry_operator.api.router import Router
from kvferry_operator.api.service import InferenceService
from kvferry_operator.plan.pods import Argument, PodPlan, PortPlan, Probes, Slot
from kvferry_wire.limits import DEFAULT_LIMITS

MODULE = "kvferry_router"
KEYS = ("http", "state", "hash")
NAME = "router"


def router_pod(service: InferenceService) -> PodPlan:
    """The router of a service."""
    router = service.spec.router
    port = PortPlan(name="http", slot=Slot.HTTP_PORT, cluster_port=8000, local_port=router.port)
    return PodPlan(
        name=NAME,
        role="router",
        module=MODULE,
        argv=tuple(_argv(service, router)),
        env=tuple(sorted((variable.name, variable.value) for variable in router.env)),
        ports=(port,),
        probes=Probes(traffic="/readyz/router"),
        requests=tuple(sorted(router.resources.requests.items())),
        limits=tuple(sorted(router.resources.limits.items())),
        image=router.image,
        keys=KEYS,
    )


def _argv(service: InferenceService, router: Router) -> list[Argument]:
    argv: list[Argument] = ["--service-name", service.metadata.name, "--model-name", service.spec.model.name]
    argv += ["--pods-file", Slot.PODS_FILE, "--keys-dir", Slot.KEYS_DIR, "--host", Slot.HOST, "--port", Slot.HTTP_PORT]
    if router.auth == "none":
        argv += ["--auth", "none"]
    else:
        argv += ["--auth", "api-keys", "--api-keys-file", Slot.API_KEYS_FILE]
    chosen = router.disaggregation
    argv += ["--disaggregate", chosen.mode]
    if chosen.min_uncached_tokens is not None:
        argv += ["--disaggregate-min-tokens", str(chosen.min_uncached_tokens)]
    if chosen.max_cached_share is not None:
        argv += ["--disaggregate-max-cached-share", str(chosen.max_cached_share)]
    argv += ["--transfer-failure", service.spec.transfer.failure_policy]
    return [*argv, "--request-deadline", format_seconds(request_deadline_s(router))]


def request_deadline_s(router: Router) -> float:
    """How long a request of this service may last."""
    deadline = router.request_deadline
    return DEFAULT_LIMITS.request_deadline_s if deadline is None else parse_duration(deadline)
