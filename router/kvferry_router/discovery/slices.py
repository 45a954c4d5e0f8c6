"""EndpointSlices, and the pods that they name. Pure.

Pods are only those of the service's own pools: endpoints that refer to a pod of the same namespace, in a slice of one
of the pools' Services. A pod may be named by several slices for a while, and an address by several pods; then the slice
that changed last has the last word, and of two with equal age the more careful one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

import msgspec

from kvferry_router.discovery.endpoints import TERMINATING, Endpoint
from kvferry_wire.pod import Role

SERVICE_LABEL = "kubernetes.io/service-name"
HTTP_PORT, STATE_PORT = "http", "state"  # ports by name, as the pools' Services give them
NOT_READY = "not ready, says Kubernetes"

# Why an endpoint is no pod of the pool, or not used as one: values of a metric's label.
LEFT_OUT = ("foreign", "address", "no_port", "shadowed", "too_many")

_BY_FAMILY = {"IPv4": 4, "IPv6": 6}
_CAREFUL = {"": 0, NOT_READY: 1, TERMINATING: 2}


class ObjectMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Metadata of an object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None


class TargetRef(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an endpoint stands for."""

    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""


class Conditions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of an endpoint. The API says how to read what is absent."""

    ready: bool | None = None  # absent: ready
    serving: bool | None = None
    terminating: bool | None = None  # absent: not terminating


class SliceEndpoint(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One endpoint. All its addresses lead to the same pod; consumers use the first."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions | None = None
    target_ref: TargetRef | None = None

    def withheld(self) -> str:
        """Why nothing new may be sent there; empty when it may."""
        told = self.conditions or Conditions()
        if told.terminating:
            return TERMINATING
        return NOT_READY if told.ready is False else ""


class SlicePort(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of a Service's endpoints, of one address family."""

    metadata: ObjectMeta
    address_type: str = ""
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None

    def port(self, name: str) -> int | None:
        """A TCP port by its name."""
        for port in self.ports or ():
            if port.name == name and port.protocol in (None, "TCP") and port.port is not None:
                return port.port if 1 <= port.port <= 65535 else None
        return None


class _Word(NamedTuple):
    """What one slice says of one pod."""

    age: int  # grows with each change that was heard of
    careful: int  # 2 terminating, 1 not ready, 0 ready
    slice: str  # so that equal words are told apart in the same way everywhere
    preferred: bool  # the address is of the family that this process has itself
    endpoint: Endpoint


class PoolSlices:
    """The slices of a service's pools, and the pods of the pools after the last of them."""

    def __init__(self, namespace: str, pools: Mapping[str, Role], *, family: int, max_pods: int) -> None:
        """
        Args:
            namespace: of the service.
            pools: the pools' Services by name, with the role of their pods.
            family: 4 or 6, which address of a pod with both is used.
            max_pods: so many slices and so many pods are kept.
        """
        self._namespace = namespace
        self._pools = dict(pools)
        self._family = family
        self._max_pods = max_pods
        self._slices: dict[str, tuple[int, EndpointSlice]] = {}
        self._age = 0
        self._overflow = False  # a slice found no room since the last list
        self.left_out: Counter[str] = Counter()  # endpoints by the reason why they are no members, after `members`

    def __len__(self) -> int:
        return len(self._slices)

    def __repr__(self) -> str:
        return f"PoolSlices({self._namespace}, {sorted(self._slices)}, left_out={dict(self.left_out)})"

    def replace(self, slices: Iterable[EndpointSlice]) -> None:
        """Take a whole list. A slice that it holds unchanged keeps its age."""
        self._age += 1
        self._overflow = False
        before, self._slices = self._slices, {}
        for found in slices:
            if self._owns(found):
                age, known = before.get(found.metadata.name, (0, None))
                same = known is not None and known.metadata == found.metadata
                self._keep(found, age if same else self._age)

    def put(self, changed: EndpointSlice) -> None:
        """Take a slice that was added or modified; one that is not of the pools (any more) goes."""
        if self._owns(changed):
            self._age += 1
            self._keep(changed, self._age)
        else:
            self.remove(changed.metadata.name)

    def remove(self, name: str) -> None:
        """A slice was deleted."""
        self._slices.pop(name, None)

    def members(self, *, current: bool = True) -> tuple[Endpoint, ...]:
        """The pods of all pools, by name.

        Args:
            current: whether the slices are up to date. Where they may not be, that a pod was not ready says nothing of
                it now, and it is not held back for that; a pod that terminates never comes back.
        """
        self.left_out = Counter()
        believed = [_believed(words) for words in self._words().values()]
        holders: dict[tuple[str, int], _Word] = {}
        for word in believed:
            place = word.endpoint.host, word.endpoint.http
            # An address is a ready pod's before any other's: the others have had it.
            if place not in holders or _claim(word) > _claim(holders[place]):
                holders[place] = word
        self.left_out["shadowed"] += len(believed) - len(holders)
        kept = sorted(holders.values(), key=lambda word: (word.careful, word.endpoint.name))
        self.left_out["too_many"] += max(0, len(kept) - self._max_pods) + self._overflow
        pods = [word.endpoint for word in kept[: self._max_pods]]
        if not current:
            pods = [_lifted(pod) for pod in pods]
        return tuple(sorted(pods, key=lambda pod: pod.name))

    def _owns(self, found: EndpointSlice) -> bool:
        labels = found.metadata.labels or {}
        return found.metadata.namespace == self._namespace and labels.get(SERVICE_LABEL, "") in self._pools

    def _keep(self, found: EndpointSlice, age: int) -> None:
        name = found.metadata.name
        if name in self._slices or len(self._slices) < self._max_pods:
            self._slices[name] = age, found
        else:
            self._overflow = True

    def _words(self) -> dict[str, list[_Word]]:
        """By pod name, what is said of it."""
        words: dict[str, list[_Word]] = {}
        for name, (age, found) in self._slices.items():
            role = self._pools[(found.metadata.labels or {})[SERVICE_LABEL]]
            http, state = found.port(HTTP_PORT), found.port(STATE_PORT)
            for endpoint in found.endpoints or ():
                reference, address = endpoint.target_ref, _address(found, endpoint)
                if reference is None or not self._is_own_pod(reference):
                    self.left_out["foreign"] += 1
                elif address is None:
                    self.left_out["address"] += 1
                elif http is None or state is None:
                    self.left_out["no_port"] += 1
                else:
                    withheld = endpoint.withheld()
                    pod = Endpoint(
                        name=reference.name,
                        role=role,
                        host=str(address),
                        http=http,
                        state=state,
                        uid=reference.uid,
                        withheld=withheld,
                    )
                    word = _Word(age, _CAREFUL[withheld], name, address.version == self._family, pod)
                    words.setdefault(pod.name, []).append(word)
        return words

    def _is_own_pod(self, reference: TargetRef) -> bool:
        own = reference.namespace in ("", self._namespace)
        return own and reference.kind == "Pod" and bool(reference.name) and bool(reference.uid)


def _believed(words: list[_Word]) -> _Word:
    """What is believed of a pod: its state as said last, at its address of the preferred family."""
    last = max(words, key=lambda word: word[:3])
    of_this_pod = [word for word in words if word.endpoint.uid == last.endpoint.uid]
    placed = max(of_this_pod, key=lambda word: (word.preferred, *word[:3]))
    return last._replace(endpoint=msgspec.structs.replace(placed.endpoint, withheld=last.endpoint.withheld))


def _claim(word: _Word) -> tuple[bool, int, int, str]:
    """Of two pods with one address the one with the larger claim has it."""
    return word.careful == 0, word.age, -word.careful, word.endpoint.name


def _lifted(pod: Endpoint) -> Endpoint:
    return msgspec.structs.replace(pod, withheld="") if pod.withheld == NOT_READY else pod


def _address(found: EndpointSlice, endpoint: SliceEndpoint) -> IPv4Address | IPv6Address | None:
    """The endpoint's address, if it is one that a pod can have."""
    try:
        address = ip_address(endpoint.addresses[0])
    except (IndexError, ValueError):
        return None
    if address.version != _BY_FAMILY.get(found.address_type):
        return None
    mapped = isinstance(address, IPv6Address) and address.ipv4_mapped is not None
    special = address.is_unspecified or address.is_loopback or address.is_link_local or address.is_multicast or mapped
    return None if special else address
