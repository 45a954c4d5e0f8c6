"""All objects of a service at its current revision, in the order in which they are best applied."""

from collections.abc import Mapping

from kvferry_operator.plan.manifests import engines, policies, router, services, support
from kvferry_operator.plan.manifests.context import Context
from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.plan.manifests.model import store_ports
from kvferry_operator.plan.service import PlanError


def check_cluster(context: Context) -> None:
    """Raise ``PlanError`` for what this cluster cannot run. The CRD has most of these rules; older objects may not."""
    service, plan, settings = context.service, context.plan, context.settings
    faults: list[str] = []
    for field, asked, allowed, value in (
        ("ingress", service.spec.router.ingress, settings.ingresses, "ingresses.enabled"),
        ("httpRoute", service.spec.router.http_route, settings.http_routes, "httpRoutes.enabled"),
    ):
        if asked is not None and not allowed:
            faults.append(f"spec.router.{field}: given, but the operator may not write it; the chart's {value} lets it")
    if plan.source.kind == "path":
        faults.append(f"spec.model.source: got {plan.source}, a path of one machine; a cluster has no such path")
    keys = service.spec.router.api_keys
    if plan.auth == "apiKeys" and (keys is None or keys.secret_ref is None):
        faults.append("spec.router.apiKeys.secretRef: missing; on a cluster API keys are read from a Secret")
    if faults:
        raise PlanError("\n".join(faults))


def objects(context: Context, replicas: Mapping[str, int]) -> tuple[Object, ...]:
    """What is applied: everything but what is only ever created (the key Secret, role objects).

    Args:
        replicas: pods of each role at the current revision.

    Raises:
        PlanError: no cluster can run it.
    """
    owner, plan, spec = context.owner, context.plan, context.service.spec
    check_cluster(context)
    ports = store_ports(spec.model, plan.source, context.settings.model_store_ports)
    made: list[Object] = [
        support.engine_account(owner),
        support.plan_notes(owner, plan, all_notes(context), context.commits),
        *policies.policies(owner, context.settings, store_ports=ports),
        *(services.pool_service(owner, pod) for pod in plan.templates if pod.role != "router"),
        services.client_service(owner, spec.router),
        *(support.budget(owner, pod.role) for pod in plan.templates),
    ]
    for pod in plan.templates:
        pool = spec.prefill if pod.role == "prefill" else spec.decode
        if pod.role == "router":
            made.append(router.router_deployment(context, pod, replicas[pod.role]))
        elif pool is not None:
            made.append(engines.engine_deployment(context, pod, pool, replicas[pod.role]))
    if spec.router.ingress is not None:
        made.append(services.ingress(owner, spec.router.ingress, spec.router.port))
    if spec.router.http_route is not None:
        made.append(services.http_route(owner, spec.router.http_route, spec.router.port))
    return tuple(made)


def all_notes(context: Context) -> tuple[str, ...]:
    """The plan's notes and those on resources."""
    engine_pods = [pod for pod in context.plan.templates if pod.role != "router"]
    return (*context.plan.notes, *(note for pod in engine_pods for note in engines.pool_resources(context, pod).notes))
