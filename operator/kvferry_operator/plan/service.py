"""From a manifest to the pods that serve it."""

from kvferry_operator.api.service import EngineRole, EngineRoleName, InferenceService
from kvferry_operator.api.source import parse_source
from kvferry_operator.plan.engine import engine_pod
from kvferry_operator.plan.pods import Observed, PodPlan, ServicePlan
from kvferry_operator.plan.revision import revision
from kvferry_operator.plan.router import router_pod
from kvferry_operator.plan.threads import threads


class PlanError(ValueError):
    """A manifest that is right in itself but cannot be run where it was asked for."""


def plan(service: InferenceService, observed: Observed) -> ServicePlan:
    """The pods of a service. The same arguments give the same plan.

    Raises:
        PlanError: on one machine (``observed.cores`` given), where no pod could answer or no key file is named.
    """
    spec = service.spec
    if observed.cores is not None:
        _check_local(service)
    pods: list[PodPlan] = []
    templates: list[PodPlan] = []
    notes: list[str] = []
    engines = spec.prefill_replicas + spec.decode.replicas
    pools: tuple[tuple[EngineRoleName, EngineRole | None], ...] = (("prefill", spec.prefill), ("decode", spec.decode))
    for role, pool in pools:
        if pool is None:
            continue
        role_threads, note = threads(pool, spec.engine_of(role), observed.cores, engines)
        templates.append(engine_pod(spec, role, pool, 0, role_threads))
        if pool.replicas > 0:
            notes.append(f"{role}: {note}")
        pods += [engine_pod(spec, role, pool, index, role_threads) for index in range(pool.replicas)]
    if spec.prefill_replicas == 0:
        notes.append("no prefill pool: decode pods compute prompts themselves")
    keys = spec.router.api_keys
    router = router_pod(service)
    return ServicePlan(
        name=service.metadata.name,
        model_name=spec.model.name,
        source=parse_source(spec.model.source),
        s3_endpoint=None if spec.model.s3 is None else spec.model.s3.endpoint,
        s3_region=None if spec.model.s3 is None else spec.model.s3.region,
        revision=revision(spec),
        pods=(*pods, router),
        templates=(*templates, router),
        port=spec.router.port,
        auth=spec.router.auth,
        api_keys_file=None if keys is None else keys.keys_file,
        notes=tuple(notes),
    )


def _check_local(service: InferenceService) -> None:
    faults: list[str] = []
    router = service.spec.router
    if service.spec.decode.replicas == 0:
        faults.append("spec.decode.replicas: got 0; on one machine at least 1 decode pod must run")
    if router.replicas != 1:
        faults.append(f"spec.router.replicas: got {router.replicas}; one machine runs 1 router")
    source = parse_source(service.spec.model.source)
    if source.kind in ("pvc", "image"):
        faults.append(f"spec.model.source: got {source}; on one machine a model is no volume or image of a cluster")
    if router.auth == "apiKeys" and (router.api_keys is None or router.api_keys.keys_file is None):
        faults.append("spec.router.apiKeys.keysFile: missing; on one machine API keys are read from a file")
    if faults:
        raise PlanError("\n".join(faults))
