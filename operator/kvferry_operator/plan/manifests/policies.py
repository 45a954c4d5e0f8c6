"""NetworkPolicies: nothing in or out, then each flow of the service by name.

Clients reach the router; the router its engines; decode engines the KV ports of the service's engines: of prefill, and
of decode pods that answers leave. Pods of another revision are among them, since answers go on there in a rollout that
leaves KV as it is; where it does not, the handshake refuses. Monitoring reaches the engines' metrics. Out go DNS and
the API server for routers, DNS and the model store for pods that fetch. A policy knows pods, not containers: where the
fetching container may reach the store, so may the engine beside it.
"""

from ipaddress import IPv4Network, IPv6Network, ip_network

from kvferry_operator.plan.manifests.meta import Object, Owner, make_object, selector
from kvferry_operator.plan.manifests.names import ENGINE_ROLES, child
from kvferry_operator.plan.manifests.settings import ClusterSettings
from kvferry_wire.urls import METADATA_ADDRESSES

HTTP, CONTROL, DATA, STATE = "http", "control", "data", "state"  # ports of containers by name
DNS_PORT = 53
NAMESPACE_NAME = "kubernetes.io/metadata.name"
# Cloud metadata services answer here; no pod of ours asks them.
NEVER = ("169.254.0.0/16", "fe80::/10", *(str(ip_network(address)) for address in METADATA_ADDRESSES))
EVERYWHERE = {4: str(IPv4Network((0, 0))), 6: str(IPv6Network((0, 0)))}


def policies(owner: Owner, settings: ClusterSettings, *, store_ports: tuple[int, ...]) -> list[Object]:
    """All policies of a service.

    Args:
        store_ports: at which the engines' pods fetch their model; none where they do not.
    """
    if not settings.network_policies:
        return []
    return [
        _policy(owner, "deny", selector(owner.name), ingress=[], egress=[]),
        _router(owner, settings),
        *(_engine(owner, role, settings, store_ports) for role in ENGINE_ROLES),
    ]


def _router(owner: Owner, settings: ClusterSettings) -> Object:
    engines = [{"to": [_pods(owner, role) for role in ENGINE_ROLES], "ports": _ports(HTTP, STATE)}]
    return _policy(
        owner,
        "router",
        selector(owner.name, "router"),
        ingress=[{"ports": _ports(HTTP)}],
        egress=[*engines, _dns(settings), _outside(settings.api_server_ports)],
    )


def _engine(owner: Owner, role: str, settings: ClusterSettings, store_ports: tuple[int, ...]) -> Object:
    ingress: list[Object] = [
        {"from": [_pods(owner, "router")], "ports": _ports(HTTP, STATE)},
        {"from": [_pods(owner, "decode")], "ports": _ports(CONTROL, DATA)},
    ]
    if settings.monitoring_namespaces:
        watching = [_namespace(name) for name in settings.monitoring_namespaces]
        ingress.append({"from": watching, "ports": _ports(HTTP)})
    egress = [_dns(settings), _outside(store_ports)] if store_ports else []
    if role == "decode":
        egress.append({"to": [_pods(owner, each) for each in ENGINE_ROLES], "ports": _ports(CONTROL, DATA)})
    return _policy(owner, role, selector(owner.name, role), ingress=ingress, egress=egress)


def _policy(
    owner: Owner, suffix: str, chosen: dict[str, str], *, ingress: list[Object], egress: list[Object]
) -> Object:
    spec: Object = {
        "podSelector": {"matchLabels": chosen},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return make_object("networking.k8s.io/v1", "NetworkPolicy", child(owner.name, suffix), owner, {"spec": spec})


def _ports(*names: str) -> list[Object]:
    return [{"port": name, "protocol": "TCP"} for name in names]


def _pods(owner: Owner, component: str) -> Object:
    return {"podSelector": {"matchLabels": selector(owner.name, component)}}


def _namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: name}}}


def _dns(settings: ClusterSettings) -> Object:
    ports = [{"port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]
    return {"to": [_namespace(settings.dns_namespace)], "ports": ports}


def _outside(ports: tuple[int, ...]) -> Object:
    """Everywhere but the metadata addresses, on a few ports."""
    blocks = [
        {"ipBlock": {"cidr": cidr, "except": [never for never in NEVER if ip_network(never).version == version]}}
        for version, cidr in EVERYWHERE.items()
    ]
    return {"to": blocks, "ports": [{"port": port, "protocol": "TCP"} for port in ports]}
