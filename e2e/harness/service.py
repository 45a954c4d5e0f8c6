"""An InferenceService in a cluster, as its user sees it."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.harness.asking import Answer
from e2e.harness.kubectl import Kubectl, Object, conditions, names
from e2e.harness.waiting import wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
READY_S = 180.0
READY_AGAIN_S = 300.0  # of several pods at once, on a machine that has just been harmed
GONE_S = 120.0
TRUTH_S = 30.0  # within which the status says why
# Whatever the operator may make for a service.
CHILDREN = (
    "deployments,replicasets,pods,services,serviceaccounts,secrets,configmaps,poddisruptionbudgets,networkpolicies,"
    "endpointslices,inferenceserviceroles"
)


def manifest(name: str, **changes: Any) -> Object:
    """The example under another name, with fields of its spec changed: nested dicts are merged."""
    wanted: Object = yaml.safe_load(EXAMPLE.read_text())
    wanted["metadata"]["name"] = name
    _merge(wanted["spec"], changes)
    return wanted


def _merge(into: Object, changes: Object) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


class Service:
    """One InferenceService."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self.kubectl, self.name = kubectl, name

    @property
    def selector(self) -> str:
        return f"app.kubernetes.io/instance={self.name},app.kubernetes.io/managed-by=kvferry"

    def apply(self, **changes: Any) -> None:
        self.kubectl.apply(manifest(self.name, **changes))

    def seen(self) -> Object:
        return self.kubectl.get("infsvc", self.name) or {}

    def condition(self, kind: str) -> Object:
        return conditions(self.seen()).get(kind, {})

    def is_ready(self) -> bool:
        """Ready, of the generation that was asked for last, with all its pods and nothing under way."""
        seen = self.seen()
        generation = seen.get("metadata", {}).get("generation")
        found = conditions(seen)
        return all(
            found.get(kind, {}).get("status") == "True" and found[kind].get("observedGeneration") == generation
            for kind in ("Ready", "Progressing", "PrefillReady", "DecodeReady", "RouterReady")
        ) and all(role.get("ready") == f"{role.get('replicas')}/{role.get('replicas')}" for role in self.roles(seen))

    def roles(self, seen: Object | None = None) -> list[Object]:
        roles: list[Object] = (seen or self.seen()).get("status", {}).get("roles", [])
        return roles

    def wait_ready(self, seconds: float = READY_S) -> None:
        wait_for(self.is_ready, f"{self.name} to be ready", seconds, self.told)

    def wait_reason(self, kind: str, reason: str, seconds: float = TRUTH_S) -> Object:
        """The condition, once it gives this reason; it has 30 s to tell the truth."""

        def look() -> Object | None:
            found = self.condition(kind)
            return found if found.get("reason") == reason else None

        return wait_for(look, f"{kind} of {self.name} to say {reason}", seconds, self.told)

    def pods(self, role: str) -> list[Object]:
        return self.kubectl.list("pods", f"{self.selector},app.kubernetes.io/component={role}")

    def pod(self, role: str) -> str:
        """The name of a role's one pod that is not leaving."""
        (found,) = [pod for pod in self.pods(role) if not pod["metadata"].get("deletionTimestamp")]
        name: str = found["metadata"]["name"]
        return name

    def legs(self) -> dict[str, float]:
        """Answers that each decode pod writes."""
        names = [pod["metadata"]["name"] for pod in self.pods("decode")]
        return {name: self.metrics(name).get("kvferry:legs", 0.0) for name in names}

    def busiest(self) -> str:
        """The decode pod that writes most answers, as soon as one does: the router likes what a pod has cached."""

        def look() -> str:
            legs = self.legs()
            most = max(legs, key=legs.__getitem__)
            return most if legs[most] else ""

        return wait_for(look, "a decode pod that writes an answer", 60, self.told)

    def children(self) -> list[Object]:
        return self.kubectl.list(CHILDREN, self.selector)

    def delete(self) -> None:
        """Delete it, and wait until nothing is left of it."""
        self.kubectl.delete("infsvc", self.name, "--wait=true")
        wait_for(
            lambda: not self.children(),
            f"what belonged to {self.name} to go",
            GONE_S,
            lambda: f"Left: {', '.join(names(self.children()))}",
        )

    @contextmanager
    def address(self) -> Iterator[str]:
        """The router's address, reached through the API server."""
        with self.kubectl.forwarded(f"service/{self.name}-router", 8000) as address:
            yield address

    def url_by_address(self) -> str:
        """The endpoint by the Service's address, for clients on a node, which do not use the cluster's DNS."""
        address = (self.kubectl.get("service", f"{self.name}-router") or {})["spec"]["clusterIP"]
        return f"http://{address}:8000/v1"

    def metrics(self, pod: str, port: int = 8000) -> dict[str, float]:
        """A pod's metrics by name and labels."""
        path = f"/api/v1/namespaces/{self.kubectl.namespace}/pods/{pod}:{port}/proxy/metrics"
        found = {}
        for line in self.kubectl.fetch(path).splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def router_log(self, answers: Iterable[Answer]) -> str:
        """What the routers logged of answers, and around them."""
        log = self.kubectl.run(
            "logs", "--selector", f"{self.selector},app.kubernetes.io/component=router", "--tail=400"
        )
        marks = [answer.headers.get("x-request-id", "") or "no id" for answer in answers]
        lines = [line for line in log.splitlines() if "discovery" in line or any(mark in line for mark in marks)]
        return "\n".join(lines[-60:])

    def check(self, answers: Iterable[Answer], expected: Mapping[str, str] | None = None) -> None:
        """Fail unless each answer is whole, and the one that is expected to its prompt, token for token."""
        faults = {answer.fault(expected or {}): answer for answer in answers}
        faults.pop("", None)
        assert not faults, "\n".join([*faults, self.router_log(faults.values())])

    def told(self) -> str:
        """Conditions, pods and events, for the message of a failed wait."""
        lines = [
            f"  {kind}: {each.get('status')} {each.get('reason')}: {each.get('message')}"
            for kind, each in conditions(self.seen()).items()
        ]
        shown = self.kubectl.run("get", "pods", "--selector", self.selector, "--output=wide")
        events = self.kubectl.run("get", "events", "--sort-by=.lastTimestamp")
        return "\n".join(["Status:", *lines, shown, *events.splitlines()[-12:]])


@contextmanager
def service(kubectl: Kubectl, name: str, **changes: Any) -> Iterator[Service]:
    """A service while the body of the ``with`` runs; afterwards nothing of it is left."""
    made = Service(kubectl, name)
    made.apply(**changes)
    try:
        yield made
    finally:
        made.delete()


@contextmanager
def ready_service(kubectl: Kubectl, name: str, **changes: Any) -> Iterator[Service]:
    """The same, with all its pods ready."""
    with service(kubectl, name, **changes) as made:
        made.wait_ready(READY_AGAIN_S)
        yield made
