"""A service on the API server, as its user writes it and sees it."""

import copy
from typing import Any

from kvferry_operator.api.service import API_VERSION, KIND
from kvferry_operator.plan.manifests.meta import COMPONENT, INSTANCE, Object
from tests.apiserver.operator.controllers import Controllers
from tests.operator.manifests import make_manifest
from tests.support.api_server import ApiServer

BASE: dict[str, Any] = {"spec__router__ingress": {"host": "llm.example.com"}}


class Service:
    """A service in a namespace, with the controllers around it."""

    def __init__(self, server: ApiServer, namespace: str, name: str = "demo") -> None:
        self.server = server
        self.namespace = namespace
        self.name = name
        self.controllers = Controllers(server, namespace)

    # ---- what its user does

    def write(self, **changes: Any) -> None:
        """Create it, or change its spec. ``...`` takes a field away."""
        given = {path: value for path, value in (BASE | changes).items() if path not in BASE or value is not ...}
        made = make_manifest(**given, metadata__name=self.name, metadata__namespace=self.namespace)
        self.server.client.apply(made, "user")

    def scale(self, role: str, replicas: int) -> None:
        body = {"spec": {"replicas": replicas}}
        self.server.client.patch(self.ref("InferenceServiceRole", f"{self.name}-{role}"), body, "scale")

    def delete(self) -> None:
        self.server.client.delete(self.ref(KIND, self.name))

    # ---- what its user sees

    def found(self) -> Object:
        return self.server.client.get(self.ref(KIND, self.name))

    def condition(self, kind: str = "Ready") -> tuple[str, str]:
        """Status and reason of a condition; empty before there is one."""
        conditions = self.found().get("status", {}).get("conditions", ())
        return next(((one["status"], one["reason"]) for one in conditions if one["type"] == kind), ("", ""))

    def message(self, kind: str = "Ready") -> str:
        conditions = self.found().get("status", {}).get("conditions", ())
        return next((str(one["message"]) for one in conditions if one["type"] == kind), "")

    def ready(self) -> bool:
        return self.condition()[0] == "True"

    def settled(self) -> bool:
        """Ready at the spec that is asked for, with nothing on its way."""
        found = self.found()
        current = found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]
        return current and self.ready() and self.condition("Progressing")[1] == "Complete"

    def child(self, kind: str, name: str, api_version: str = "v1") -> Object | None:
        return self.server.client.find(
            {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": self.namespace}}
        )

    def deployment(self, role: str) -> Object:
        """The one Deployment of a role."""
        (found,) = [
            child
            for (kind, _), child in self.controllers.objects().items()
            if kind == "Deployment"
            and (child["metadata"]["labels"][COMPONENT], child["metadata"]["labels"][INSTANCE]) == (role, self.name)
        ]
        return found

    def picture(self) -> Any:
        """All that matters of the end: objects without what differs between two clusters, conditions, and pods."""
        objects = self.controllers.objects()
        pods = sorted(found["metadata"]["labels"][COMPONENT] for found in objects.values() if found["kind"] == "Pod")
        bare = {key: bared(found) for key, found in objects.items() if key[0] not in ("Pod", "Secret")}
        status = self.found()["status"]
        told = {one["type"]: (one["status"], one["reason"], one["message"]) for one in status["conditions"]}
        secrets = sum(kind == "Secret" for kind, _ in objects)
        return bare, told, status["roles"], pods, secrets, sorted(self.controllers.ended)

    def ref(self, kind: str, name: str) -> Object:
        return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name, "namespace": self.namespace}}


def bared(found: Object) -> Object:
    """An object without identities and times. Its generation stays: each one more is a needless write."""
    bare = copy.deepcopy(found)
    metadata = bare["metadata"]
    for name in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "namespace", "ownerReferences"):
        metadata.pop(name, None)
    for template in [bare["spec"]["template"]] if found["kind"] == "Deployment" else []:
        for volume in template["spec"]["volumes"]:
            volume.pop("secret", None)  # its name holds the service's uid
        container = template["spec"]["containers"][0]
        container["args"] = [argument.partition("/")[2] or argument for argument in container["args"]]
        metadata["annotations"] = {}  # a hash of all that
    if found["kind"] == "Service":
        bare["spec"].pop("clusterIP", None)
        bare["spec"].pop("clusterIPs", None)
    if found["kind"] != "Deployment":
        metadata.get("annotations", {}).pop("serving.kvferry.dev/applied", None)
    return bare
