"""Who may speak to whom, on which port: every pair of ends is tried, and the open ones are a table."""

import itertools
from typing import Any

import pytest

from kvferry_operator.plan.manifests.objects import objects
from kvferry_operator.plan.manifests.settings import ClusterSettings
from tests.operator.cluster import DEMO, SETTINGS, make_context
from tests.operator.network import End, Network, Object, pod_end

HTTP, CONTROL, DATA, STATE = 8000, 5600, 5601, 5557
PORTS = (HTTP, CONTROL, DATA, STATE, 22, 53, 80, 443, 6443, 8443, 9000, 9090, 10250)
DNS = {(53, "TCP"), (53, "UDP")}
Flow = tuple[int, str]

STRANGERS = (
    End("a client", "10.1.0.1", "ns", {"app": "client"}),
    End("a client elsewhere", "10.1.0.2", "elsewhere", {"app": "client"}),
    End("monitoring", "10.1.0.3", "monitoring", {"app": "prometheus"}),
    End("dns", "10.1.0.4", "kube-system", {"k8s-app": "kube-dns"}),
    End("the API server", "172.16.0.1"),
    End("the internet", "93.184.216.34"),
    End("the internet, IPv6", "2606:2800::1"),
)
METADATA = tuple(
    End(f"metadata {address}", address)
    for address in (
        "169.254.169.254", "169.254.0.1", "169.254.170.2", "fe80::a9fe:a9fe", "fd00:ec2::254", "fd20:ce::254",
        "100.100.100.200", "168.63.129.16",
    )
)  # fmt: skip


def make_made(settings: ClusterSettings = SETTINGS, namespace: str = "ns", **changes: Any) -> tuple[Object, ...]:
    """All objects of a service, in a namespace."""
    context = make_context(settings, **changes)
    made = objects(context, {pod.role: 1 for pod in context.plan.templates})
    for one in made:
        one["metadata"]["namespace"] = namespace
    return made


def ends_of(made: tuple[Object, ...], prefix: str, base: str) -> dict[str, End]:
    """A pod of each role; engines also one of an earlier revision."""
    found: dict[str, End] = {}
    for number, one in enumerate(one for one in made if one["kind"] == "Deployment"):
        role = one["metadata"]["labels"]["app.kubernetes.io/component"]
        end = pod_end(one, f"{base}.{number}")
        found[prefix + role] = end
        if role != "router":
            labels = {**end.labels, "serving.kvferry.dev/revision": "earlier"}
            found[f"{prefix}{role} of before"] = End(role, f"{base}.{number + 100}", end.namespace, labels, end.ports)
    return found


def open_flows(network: Network, ends: dict[str, End], ours: set[str]) -> dict[tuple[str, str], set[Flow]]:
    """Every flow that is allowed and has a pod of ours at an end."""
    found: dict[tuple[str, str], set[Flow]] = {}
    for source, target in itertools.permutations(ends, 2):
        if source not in ours and target not in ours:
            continue
        for port, protocol in itertools.product(PORTS, ("TCP", "UDP")):
            if network.allows(ends[source], ends[target], port, protocol):
                found.setdefault((source, target), set()).add((port, protocol))
    return found


def tcp(*ports: int) -> set[Flow]:
    return {(port, "TCP") for port in ports}


def expected(ours: dict[str, End], ends: dict[str, End], *, store: set[Flow], watched: bool) -> Any:
    """The table, for one service.

    Args:
        store: what is open to the model store, from pods that fetch.
        watched: whether the namespace ``monitoring`` may read metrics.
    """
    engines = [name for name in ours if "router" not in name]
    outside = [one.name for one in STRANGERS]
    table: dict[tuple[str, str], set[Flow]] = {}
    for name in ends:
        if name != "router" and "metadata" not in name and not name.startswith("other "):
            table[name, "router"] = tcp(HTTP) if name not in ours else set()
        if name.startswith("metadata"):
            table[name, "router"] = tcp(HTTP)  # an address may ask; nobody asks it
    for engine in engines:
        table["router", engine] = tcp(HTTP, STATE)
        table["monitoring", engine] = tcp(HTTP) if watched else set()
        for other in engines:
            if other != engine and engine.startswith("decode"):
                table[engine, other] = tcp(CONTROL, DATA)
        for place in outside:
            table[engine, place] = set(store) | (DNS if store and place == "dns" else set())
    for place in outside:
        table["router", place] = tcp(443, 6443) | (DNS if place == "dns" else set())
    return {pair: flows for pair, flows in table.items() if flows}


@pytest.mark.parametrize(
    ("model", "store"),
    [
        ({"source": "toy:"}, set()),
        ({"source": DEMO}, tcp(443)),
        ({"source": "https://models.example.com/m/"}, tcp(443)),
        ({"source": "http://models.example.com/m/"}, tcp(443, 80)),
        ({"source": "https://models.example.com:8443/m/x.gguf"}, tcp(443, 8443)),
        ({"source": "s3://models/m"}, tcp(443)),
        ({"source": "s3://models/m", "s3": {"endpoint": "http://minio:9000"}}, tcp(443, 9000)),
        ({"source": "pvc://claim"}, set()),
        ({"source": "image://registry/m:1"}, set()),
    ],
    ids=lambda value: str(value.get("source")) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("watched", [False, True], ids=["unwatched", "watched"])
def test_every_flow_is_in_the_table_and_every_entry_flows(
    model: dict[str, Any], store: set[Flow], watched: bool
) -> None:
    """Router to engines, decode to engines on the KV ports, clients to the router; out go only DNS, API server, store.

    Answers move between decode pods, also of two revisions: which KV may be read is the handshake's matter.
    """
    monitoring = ("monitoring",) if watched else ()
    settings = ClusterSettings(runtime_image="r", router_image="s", monitoring_namespaces=monitoring)
    made = make_made(settings, spec__model={"name": "m", **model})
    ours = ends_of(made, "", "10.2.0")
    ends = {**ours, **{end.name: end for end in (*STRANGERS, *METADATA)}}
    assert all(Network(made).holds(end) for end in ours.values())
    assert open_flows(Network(made), ends, set(ours)) == expected(ours, ends, store=store, watched=watched)


@pytest.mark.parametrize("namespace", ["ns", "elsewhere"])
@pytest.mark.parametrize("source", ["toy:", DEMO])
def test_services_are_strangers_to_each_other(namespace: str, source: str) -> None:
    """Another service beside it, and one of the same name in another namespace: not one flow."""
    first = make_made(spec__model__source=source)
    name = "other" if namespace == "ns" else "demo"
    second = make_made(namespace=namespace, metadata__name=name, spec__model__source=source)
    network = Network((*first, *second))
    mine, theirs = ends_of(first, "", "10.2.0"), ends_of(second, "other ", "10.3.0")
    for one, other in itertools.product(mine.values(), theirs.values()):
        for port in PORTS:
            assert not network.allows(one, other, port), (one.name, other.name, port)
            assert not network.allows(other, one, port), (other.name, one.name, port)


def test_no_pod_asks_the_clouds_metadata() -> None:
    """Neither link-local addresses nor the other known ones, at any port, from any pod, whatever is fetched."""
    made = make_made(spec__model={"name": "m", "source": "http://models.example.com/m/"})
    for end, target in itertools.product(ends_of(made, "", "10.2.0").values(), METADATA):
        assert not [port for port in PORTS if Network(made).allows(end, target, port)], (end.name, target.name)


def test_without_policies_everything_is_open_and_none_is_made() -> None:
    """The setting leaves them out as a whole, for clusters that have rules of their own."""
    made = make_made(ClusterSettings(runtime_image="r", router_image="s", network_policies=False))
    assert not [one for one in made if one["kind"] == "NetworkPolicy"]
    ours = ends_of(made, "", "10.2.0")
    assert Network(made).allows(STRANGERS[0], ours["decode"], DATA)


# ---- the evaluator itself ----


def policy(**spec: Any) -> Object:
    return {
        "kind": "NetworkPolicy",
        "metadata": {"namespace": "ns", "name": "p"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], **spec},
    }


A, B = End("a", "10.0.0.1", "ns", {"x": "a"}, {"web": 80}), End("b", "10.0.0.2", "ns", {"x": "b"}, {"web": 81})
FAR = End("far", "10.0.0.3", "far", {"x": "a"})


@pytest.mark.parametrize(
    ("rules", "source", "port", "allowed"),
    [
        ([], A, 81, False),
        ([{}], FAR, 22, True),
        ([{"ports": [{"port": "web"}]}], A, 81, True),
        ([{"ports": [{"port": "web"}]}], A, 80, False),
        ([{"ports": [{"port": 81, "protocol": "UDP"}]}], A, 81, False),
        ([{"from": [{"podSelector": {"matchLabels": {"x": "a"}}}]}], A, 81, True),
        ([{"from": [{"podSelector": {"matchLabels": {"x": "a"}}}]}], FAR, 81, False),
        ([{"from": [{"namespaceSelector": {}}]}], FAR, 81, True),
        ([{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.1/32"]}}]}], A, 81, False),
        ([{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.1/32"]}}]}], FAR, 81, True),
    ],
)
def test_the_evaluator_reads_as_kubernetes_does(rules: list[Object], source: End, port: int, allowed: bool) -> None:
    """One rule of each kind, in and out of what it means."""
    assert Network([policy(ingress=rules)]).allows(source, B, port) is allowed


def test_the_evaluator_refuses_what_it_cannot_read() -> None:
    """A selector by expressions, a range of ports: an error, not a guess."""
    for rule in (
        {"ports": [{"port": 1, "endPort": 9}]},
        {"from": [{"podSelector": {"matchExpressions": []}}]},
    ):
        with pytest.raises(ValueError, match="does not read"):
            Network([policy(ingress=[rule])]).allows(A, B, 1)
