"""Services: a headless one per pool, by which the router finds its pods, and the clients' one before the router."""

from kvferry_operator.api.router import HttpRoute, Ingress, Router
from kvferry_operator.plan.manifests.meta import Object, Owner, make_object, selector
from kvferry_operator.plan.manifests.names import child, service_name
from kvferry_operator.plan.pods import PodPlan


def pool_service(owner: Owner, pod: PodPlan) -> Object:
    """The headless Service of a pool. A pod that is not ready is an endpoint whose ``ready`` is false."""
    spec = {
        "clusterIP": "None",
        "selector": selector(owner.name, pod.role),
        "ports": [
            {"name": port.name, "port": port.cluster_port, "targetPort": port.name, "protocol": "TCP"}
            for port in pod.ports
        ],
    }
    return make_object("v1", "Service", service_name(owner.name, pod.role), owner, {"spec": spec}, component=pod.role)


def client_service(owner: Owner, chosen: Router) -> Object:
    """The endpoint."""
    spec = {
        "type": chosen.service_type,
        "selector": selector(owner.name, "router"),
        "ports": [
            {"name": "http", "port": chosen.port, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
        ],
    }
    return make_object("v1", "Service", service_name(owner.name, "router"), owner, {"spec": spec}, component="router")


def endpoint_url(owner: Owner, chosen: Router) -> str:
    """The endpoint as clients inside the cluster reach it."""
    return f"http://{service_name(owner.name, 'router')}.{owner.namespace}.svc:{chosen.port}/v1"


def ingress(owner: Owner, chosen: Ingress, port: int) -> Object:
    """An Ingress whose one rule leads to the endpoint."""
    backend = {"service": {"name": service_name(owner.name, "router"), "port": {"number": port}}}
    paths = [{"path": "/v1", "pathType": "Prefix", "backend": backend}]
    spec: Object = {"rules": [{"host": chosen.host, "http": {"paths": paths}}]}
    if chosen.class_name is not None:
        spec["ingressClassName"] = chosen.class_name
    if chosen.tls_secret_ref is not None:
        spec["tls"] = [{"hosts": [chosen.host], "secretName": chosen.tls_secret_ref.name}]
    return make_object(
        "networking.k8s.io/v1",
        "Ingress",
        child(owner.name, "router"),
        owner,
        {"spec": spec},
        component="router",
        annotations=chosen.annotations,
    )


def http_route(owner: Owner, chosen: HttpRoute, port: int) -> Object:
    """An HTTPRoute that leads to the endpoint; answers may take as long as they take."""
    parent: Object = {"name": chosen.gateway}
    if chosen.gateway_namespace is not None:
        parent["namespace"] = chosen.gateway_namespace
    if chosen.section_name is not None:
        parent["sectionName"] = chosen.section_name
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
        "backendRefs": [{"name": service_name(owner.name, "router"), "port": port}],
        "timeouts": {"request": "0s"},
    }
    spec: Object = {"parentRefs": [parent], "rules": [rule]}
    if chosen.hostnames:
        spec["hostnames"] = list(chosen.hostnames)
    return make_object(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        child(owner.name, "router"),
        owner,
        {"spec": spec},
        component="router",
    )
