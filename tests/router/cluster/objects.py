"""EndpointSlices as the API server writes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry_router.discovery.slices import SERVICE_LABEL, EndpointSlice, PoolSlices

NAMESPACE = "team"
PREFILL, DECODE = "demo-prefill", "demo-decode"
PORTS = {"http": 8000, "state": 5557}

Object = dict[str, Any]


def make_endpoint(
    pod: str,
    address: str,
    *,
    uid: str = "",
    ready: bool | None = True,
    serving: bool | None = None,
    terminating: bool | None = None,
    **changes: Any,
) -> Object:
    """One endpoint. ``changes`` replace whole fields."""
    told = {"ready": ready, "serving": serving, "terminating": terminating}
    made = {
        "addresses": [address],
        "conditions": {name: value for name, value in told.items() if value is not None},
        "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": pod, "uid": uid or f"uid-of-{pod}"},
        "nodeName": "node-1",
    }
    return made | changes


def make_slice(
    name: str,
    *endpoints: Object,
    service: str = DECODE,
    namespace: str = NAMESPACE,
    version: str = "",
    family: str = "IPv4",
    ports: Mapping[str, int | None] = PORTS,
) -> Object:
    """One slice."""
    metadata: Object = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-of-slice-{name}",
        "labels": {SERVICE_LABEL: service, "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"},
    }
    if version:
        metadata["resourceVersion"] = version
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": metadata,
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": port, "port": number, "protocol": "TCP"} for port, number in ports.items()],
    }


def read_slice(made: Object) -> EndpointSlice:
    """As it comes from the wire."""
    return msgspec.json.decode(msgspec.json.encode(made), type=EndpointSlice)


def make_pool(family: int = 4, max_pods: int = 100) -> PoolSlices:
    return PoolSlices(NAMESPACE, {PREFILL: "prefill", DECODE: "decode"}, family=family, max_pods=max_pods)


def make_known(*slices: Object, **settings: int) -> PoolSlices:
    """A pool that has heard of these, in this order."""
    pool = make_pool(**settings)
    for made in slices:
        pool.put(read_slice(made))
    return pool


def shown(pool: PoolSlices, *, current: bool = True) -> Sequence[tuple[str, str, str, str]]:
    """Members in short: name, role, address, why withheld."""
    return [(pod.name, pod.role, pod.host, pod.withheld) for pod in pool.members(current=current)]
