"""The pure decisions against a real API server: a plain shell that performs effects, and what controllers would do.

The operator's own shell is tested in ``operator/``; this one keeps the question apart: do the decisions come to rest on
objects as the server defaults and stores them?
"""

import copy
from typing import Any

from kvferry_operator.api.role import ROLE_KIND
from kvferry_operator.api.service import API_VERSION
from kvferry_operator.plan.decide import Decision, decide
from kvferry_operator.plan.effects import Apply, ApplyFault, Create, Delete, Effect, Patch
from kvferry_operator.plan.manifests.meta import FIELD_MANAGER, INSTANCE, Object
from kvferry_operator.plan.manifests.settings import ClusterSettings
from kvferry_operator.plan.observed import Seen
from tests.operator.cluster import KEYS, NOW, SETTINGS
from tests.support.api_server import ApiServer
from tests.support.kube_client import KubeClient, Refused

GATEWAY = "gateway.networking.k8s.io/v1"
WATCHED = (
    ("apps/v1", "Deployment"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("v1", "ConfigMap"),
    ("policy/v1", "PodDisruptionBudget"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("networking.k8s.io/v1", "Ingress"),
    (GATEWAY, "HTTPRoute"),
    (API_VERSION, ROLE_KIND),
)
MOST_ROUNDS = 40


class RealCluster:
    """One service in one namespace.

    Args:
        client: writes as the operator; reads and what controllers do are the admin's.
    """

    def __init__(
        self,
        server: ApiServer,
        manifest: Object,
        namespace: str,
        client: KubeClient | None = None,
        settings: ClusterSettings = SETTINGS,
    ) -> None:
        self.server, self.admin, self.namespace, self.settings = server, server.client, namespace, settings
        self.client = client or server.client
        self.log: list[Effect] = []
        self.faults: tuple[ApplyFault, ...] = ()
        self._keys_made = False
        self.edit(manifest)

    # ---- the user's side

    def edit(self, manifest: Object) -> None:
        """Apply the manifest as `kubectl apply` does: what is left out goes."""
        wanted = copy.deepcopy(manifest)
        wanted["metadata"]["namespace"] = self.namespace
        self.name = wanted["metadata"]["name"]
        self.admin.apply(wanted, "kubectl", fieldValidation="Strict")

    def found(self) -> Object:
        """The service as the server has it."""
        metadata = {"name": self.name, "namespace": self.namespace}
        return self.admin.get({"apiVersion": API_VERSION, "kind": "InferenceService", "metadata": metadata})

    # ---- the operator's side

    def children(self) -> tuple[Object, ...]:
        return tuple(child for version, kind in WATCHED for child in self._list(version, kind))

    def _list(self, api_version: str, kind: str) -> list[Object]:
        try:
            return self.admin.list(api_version, kind, self.namespace, labelSelector=f"{INSTANCE}={self.name}")
        except Refused as refused:
            if refused.code == 404 and api_version == GATEWAY:
                return []  # not installed in this cluster
            raise

    def decide(self) -> Decision:
        seen = Seen(children=self.children(), faults=self.faults)
        return decide(self.found(), seen, self.settings, None if self._keys_made else KEYS, NOW)

    def reconcile(self) -> Decision:
        """One pass of a shell."""
        decision = self.decide()
        faults = []
        for effect in decision.effects:
            try:
                self.perform(effect)
            except Refused as refused:
                faults.append(_fault(effect, refused))
        self.faults = tuple(faults)
        if decision.status is not None and decision.status != self.found().get("status"):
            self._write_status(self.found(), decision.status)
        for name, status in decision.role_statuses.items():
            role = self.admin.get(self._named(ROLE_KIND, name))
            self._write_status(role, status)
        return decision

    def perform(self, effect: Effect) -> None:
        """Do it. Raises ``Refused`` for what is not done already."""
        self.log.append(effect)
        strict = {"fieldValidation": "Strict"}
        if isinstance(effect, Create):
            self._keys_made = self._keys_made or effect.object["kind"] == "Secret"
            _unless(409, lambda: self.client.create(effect.object, fieldManager=effect.manager, **strict))
        elif isinstance(effect, Apply):
            self.client.apply(effect.object, effect.manager, **strict)
        elif isinstance(effect, Patch):
            there = self._named(effect.kind, effect.name, effect.api_version)
            _unless(404, lambda: self.client.patch(there, effect.body, fieldManager=effect.manager, **strict))
        elif isinstance(effect, Delete):
            there = self._named(effect.kind, effect.name, effect.api_version)
            _unless(404, lambda: self.client.delete(there, propagationPolicy="Background"))

    def _write_status(self, found: Object, status: Object) -> None:
        metadata = {"name": found["metadata"]["name"], "namespace": self.namespace}
        wanted = {"apiVersion": API_VERSION, "kind": found["kind"], "metadata": metadata, "status": status}
        self.client.apply(wanted, f"{FIELD_MANAGER}-status", "status", fieldValidation="Strict")

    def _named(self, kind: str, name: str, api_version: str = API_VERSION) -> Object:
        return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": self.namespace}}

    # ---- the controllers' side

    def run(self) -> None:
        """Deployments report that all their pods are ready."""
        for child in self.admin.list("apps/v1", "Deployment", self.namespace):
            wanted = child["spec"]["replicas"]
            status: dict[str, Any] = {"observedGeneration": child["metadata"]["generation"]}
            if wanted:
                status |= dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), wanted)
            child["status"] = status
            self.admin.replace(child, "status")

    def settle(self) -> int:
        """Reconcile and run until a decision has no effect; returns the passes that had some."""
        for number in range(MOST_ROUNDS):
            decision = self.reconcile()
            self.run()
            if not decision.effects and not self.decide().effects:
                return number
        raise AssertionError(f"no rest: {[getattr(effect, 'why', effect) for effect in self.decide().effects]}")


def _unless(code: int, done: Any) -> None:
    try:
        done()
    except Refused as refused:
        if refused.code != code:
            raise


def _fault(effect: Effect, refused: Refused) -> ApplyFault:
    if isinstance(effect, Create | Apply):
        kind, name = effect.object["kind"], effect.object["metadata"]["name"]
    else:
        kind, name = effect.kind, effect.name
    return ApplyFault(kind=kind, name=name, code=refused.code, message=refused.message)


def route_crd() -> Object:
    """HTTPRoute as far as we use it, with the defaults that the Gateway API's own CRD has; no more than a stand-in."""
    text: Object = {"type": "string", "maxLength": 253}

    def defaulted(value: str) -> Object:
        return {**text, "default": value}

    parent = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "group": defaulted("gateway.networking.k8s.io"),
            "kind": defaulted("Gateway"),
            "name": text,
            "namespace": text,
            "sectionName": text,
        },
    }
    backend = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "group": defaulted(""),
            "kind": defaulted("Service"),
            "name": text,
            "port": {"type": "integer"},
            "weight": {"type": "integer", "default": 1},
        },
    }
    path = {"type": "object", "properties": {"type": defaulted("PathPrefix"), "value": defaulted("/")}}
    rule = {
        "type": "object",
        "properties": {
            "matches": {"type": "array", "items": {"type": "object", "properties": {"path": path}}},
            "backendRefs": {"type": "array", "items": backend},
            "timeouts": {
                "type": "object",
                "properties": {"request": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}},
            },
        },
    }
    spec = {
        "type": "object",
        "properties": {
            "parentRefs": {"type": "array", "items": parent},
            "hostnames": {"type": "array", "items": text},
            "rules": {"type": "array", "items": rule},
        },
    }
    schema = {"type": "object", "properties": {"spec": spec}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "httproutes.gateway.networking.k8s.io",
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api/pull/2997"},
        },
        "spec": {
            "group": "gateway.networking.k8s.io",
            "scope": "Namespaced",
            "names": {"plural": "httproutes", "singular": "httproute", "kind": "HTTPRoute"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
