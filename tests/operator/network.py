"""NetworkPolicies as Kubernetes reads them: which flow is allowed, as a pure function of objects.

What is not understood is an error, never an open or a closed door: a policy that uses more of the language than this
reads fails the test that asks.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_network
from typing import Any

Object = dict[str, Any]
NAMESPACE_NAME = "kubernetes.io/metadata.name"


@dataclasses.dataclass(frozen=True)
class End:
    """One end of a flow: a pod, or an address outside of the cluster."""

    name: str
    address: str
    namespace: str = ""  # none: no pod
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ports: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of its containers, by name


def pod_end(deployment: Object, address: str) -> End:
    """A pod of a Deployment."""
    template = deployment["spec"]["template"]
    ports = {
        port["name"]: port["containerPort"] for one in template["spec"]["containers"] for port in one.get("ports", ())
    }
    metadata = deployment["metadata"]
    return End(metadata["name"], address, metadata["namespace"], template["metadata"]["labels"], ports)


class Network:
    """A set of policies, of any namespaces. Namespaces bear their name as a label, as the API server gives it."""

    def __init__(self, objects: Iterable[Object]) -> None:
        self._policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
        for policy in self._policies:
            _only(policy["spec"], "podSelector", "policyTypes", "ingress", "egress")

    def allows(self, source: End, target: End, port: int, protocol: str = "TCP") -> bool:
        """Whether a connection may be made: the source's policies let it out and the target's let it in."""
        leaves = self._passes("Egress", "to", source, target, target, port, protocol)
        return leaves and self._passes("Ingress", "from", target, source, target, port, protocol)

    def holds(self, end: End) -> bool:
        """Whether a policy of each direction applies to the pod."""
        return all(self._of(end, direction) for direction in ("Ingress", "Egress"))

    def _of(self, end: End, direction: str) -> list[Object]:
        return [
            policy
            for policy in self._policies
            if direction in policy["spec"]["policyTypes"]
            and policy["metadata"]["namespace"] == end.namespace
            and _selects(policy["spec"]["podSelector"], end.labels)
        ]

    def _passes(self, direction: str, side: str, held: End, other: End, target: End, port: int, protocol: str) -> bool:
        mine = self._of(held, direction)
        if not mine:
            return True
        for policy in mine:
            for rule in policy["spec"].get(direction.lower(), ()):
                _only(rule, side, "ports")
                peers, ports = rule.get(side), rule.get("ports")
                peer = not peers or any(_is_peer(one, other, policy["metadata"]["namespace"]) for one in peers)
                if peer and (not ports or any(_is_port(one, target, port, protocol) for one in ports)):
                    return True
        return False


def _is_peer(peer: Object, end: End, home: str) -> bool:
    _only(peer, "podSelector", "namespaceSelector", "ipBlock")
    if "ipBlock" in peer:  # pods have addresses too; whether a block covers them is up to the network: taken as yes
        _only(peer["ipBlock"], "cidr", "except")
        return _within(end, peer["ipBlock"]["cidr"]) and not any(
            _within(end, cidr) for cidr in peer["ipBlock"].get("except", ())
        )
    if not end.namespace:
        return False
    where = peer.get("namespaceSelector")
    placed = end.namespace == home if where is None else _selects(where, {NAMESPACE_NAME: end.namespace})
    return placed and _selects(peer.get("podSelector", {}), end.labels)


def _is_port(entry: Object, target: End, port: int, protocol: str) -> bool:
    _only(entry, "port", "protocol")
    asked = entry["port"]
    number = target.ports.get(asked) if isinstance(asked, str) else asked
    return number == port and entry.get("protocol", "TCP") == protocol


def _within(end: End, cidr: str) -> bool:
    address, network = ip_address(end.address), ip_network(cidr)
    return address.version == network.version and address in network


def _selects(selector: Object, labels: Mapping[str, str]) -> bool:
    _only(selector, "matchLabels")
    return selector.get("matchLabels", {}).items() <= labels.items()


def _only(found: Object, *known: str) -> None:
    unknown = found.keys() - set(known)
    if unknown:
        raise ValueError(f"a policy uses {', '.join(sorted(unknown))}, which this evaluator does not read")
