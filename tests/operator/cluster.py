"""Builders of what a cluster holds: services with an owner, rendered objects, pods in any state."""

import copy
import re
from typing import Any

from kvferry_operator.plan import Observed, plan
from kvferry_operator.plan.manifests.context import Context
from kvferry_operator.plan.manifests.meta import COMPONENT, REVISION, Object, Owner, labels
from kvferry_operator.plan.manifests.objects import objects
from kvferry_operator.plan.manifests.settings import ClusterSettings
from kvferry_wire.keys import KEY_NAMES
from tests.operator.manifests import make_manifest, make_service

NOW, LATER = "2026-01-02T03:04:05Z", "2026-01-02T03:05:05Z"
UID = "11111111-2222-3333-4444-555555555555"
SETTINGS = ClusterSettings(
    runtime_image="registry/kvferry-runtime:1",
    router_image="registry/kvferry-router:1",
    ingresses=True,
    http_routes=True,
)
KEYS = {name: bytes([index]) * 32 for index, name in enumerate(KEY_NAMES, 1)}
DEMO = "demo:smollm2"


def make_owner(name: str = "demo", uid: str = UID, generation: int = 1) -> Owner:
    return Owner(name=name, namespace="ns", uid=uid, generation=generation)


def make_context(settings: ClusterSettings = SETTINGS, **changes: Any) -> Context:
    service = make_service(**changes)
    return Context(
        owner=make_owner(service.metadata.name),
        service=service,
        plan=plan(service, Observed()),
        settings=settings,
    )


def make_objects(settings: ClusterSettings = SETTINGS, **changes: Any) -> tuple[Object, ...]:
    context = make_context(settings, **changes)
    return objects(context, {pod.role: 1 for pod in context.plan.templates})


def find(made: tuple[Object, ...], kind: str, name: str) -> Object:
    """The object of this name, or of this name and a revision."""
    of_kind = {one["metadata"]["name"]: one for one in made if one["kind"] == kind}
    if name in of_kind:
        return of_kind[name]
    (found,) = [one for mine, one in of_kind.items() if re.fullmatch(f"{name}(-[0-9a-f]{{10}})?", mine)]
    return found


def pod_of(made: tuple[Object, ...], role: str) -> Object:
    """The pod's spec of a role."""
    spec: Object = find(made, "Deployment", f".*{role}")["spec"]["template"]["spec"]
    return spec


def container_of(made: tuple[Object, ...], role: str) -> Object:
    (container,) = pod_of(made, role)["containers"]
    found: Object = container
    return found


def make_found(generation: int = 1, status: Object | None = None, uid: str = UID, **changes: Any) -> Object:
    """An InferenceService as an API server gives it."""
    found = make_manifest(**changes)
    found["metadata"] |= {
        "namespace": "ns",
        "uid": uid,
        "generation": generation,
        "resourceVersion": "1",
        "managedFields": [],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x" * 70_000},
    }
    if status is not None:
        found["status"] = copy.deepcopy(status)
    return found


def make_pod(
    role: str,
    revision: str | None,
    *,
    name: str = "",
    ready: bool = False,
    started: bool = False,
    phase: str = "Running",
    containers: list[Object] | None = None,
    init: list[Object] | None = None,
    conditions: list[Object] | None = None,
    **status: Any,
) -> Object:
    """A pod with its status. ``containers`` and ``init`` are container statuses; absent, the container runs."""
    running = {"name": role, "ready": ready, "started": started or ready, "state": {"running": {}}, "restartCount": 0}
    marks = labels("demo", role, revision)
    spec: Object = {
        "containers": [
            {
                "name": role,
                "image": "registry/kvferry-runtime:1",
                "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
            }
        ],
        "volumes": [{"name": "keys", "secret": {"secretName": "demo-keys"}}],
    }
    if init is not None:
        spec["initContainers"] = [{"name": "fetch-model", "image": "registry/kvferry-runtime:1"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name or f"demo-{role}-x", "namespace": "ns", "labels": marks},
        "spec": spec,
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}, *(conditions or [])],
            "containerStatuses": [running] if containers is None else containers,
            "initContainerStatuses": init or [],
            **status,
        },
    }


def role_of(found: Object) -> tuple[str | None, str | None]:
    """Component and revision of an object."""
    marks = found["metadata"].get("labels", {})
    return marks.get(COMPONENT), marks.get(REVISION)
