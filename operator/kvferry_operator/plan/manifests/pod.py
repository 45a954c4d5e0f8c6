"""A pod template: what all roles share. What a role adds comes as a ``Part``."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry_operator.api.pods import PodSettings
from kvferry_operator.plan.manifests.context import Context
from kvferry_operator.plan.manifests.meta import Object, labels, selector
from kvferry_operator.plan.manifests.probes import probes
from kvferry_operator.plan.manifests.security import KEY_MODE, container_security, pod_security
from kvferry_operator.plan.manifests.settings import ClusterSettings
from kvferry_operator.plan.pods import PodPlan, Slot

KEYS_FOLDER = "/var/run/kvferry/keys"
TMP = "/tmp"  # noqa: S108 - an emptyDir of the pod's own
POD_IP = "$(POD_IP)"  # the kubelet puts the pod's address in its place
# The kubelet ends a pod while its removal still spreads: so long it goes on as before.
LINGER_S = 5


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a role's pods have beside what all pods have."""

    image: str
    argv: tuple[str, ...]
    resources: Object
    startup_s: float  # how long until it answers, at most
    grace_s: int  # from SIGTERM to SIGKILL, LINGER_S included
    service_account: str
    keys_secret: str
    tmp: str  # size of /tmp
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    init: tuple[Object, ...] = ()


def arguments(pod: PodPlan, values: Mapping[Slot, str]) -> tuple[str, ...]:
    """A pod's command line in a cluster: it binds its own address and the fixed ports."""
    known = {
        Slot.HOST: POD_IP,
        Slot.KEYS_DIR: KEYS_FOLDER,
        **{port.slot: str(port.cluster_port) for port in pod.ports},
        **values,
    }
    return (*pod.rendered(known), "--log-format", "json")


def pod_template(context: Context, pod: PodPlan, chosen: PodSettings, part: Part) -> Object:
    """The template of a role's Deployment. Routers serve all revisions; engine pods are of the plan's."""
    owner, settings, component = context.owner, context.settings, pod.role
    revision = None if component == "router" else context.plan.revision
    marks = selector(owner.name, component, revision)
    spec: Object = {
        "serviceAccountName": part.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": part.grace_s,
        "containers": [_container(pod, part, settings)],
        "volumes": [_keys_volume(pod, part.keys_secret), _scratch(part.tmp), *part.volumes],
        **_placement(chosen, marks),
    }
    if part.init:
        spec["initContainers"] = list(part.init)
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    metadata: Object = {"labels": {**chosen.labels, **labels(owner.name, component, revision)}}
    if chosen.annotations:
        metadata["annotations"] = dict(chosen.annotations)
    return {"metadata": metadata, "spec": spec}


def _container(pod: PodPlan, part: Part, settings: ClusterSettings) -> Object:
    keys = {"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True}
    return {
        "name": pod.role,
        "image": part.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-P", "-m", pod.module],
        "args": list(part.argv),
        "env": _env(pod),
        "ports": [{"name": port.name, "containerPort": port.cluster_port, "protocol": "TCP"} for port in pod.ports],
        "resources": part.resources,
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "lifecycle": {"preStop": {"sleep": {"seconds": LINGER_S}}},
        "volumeMounts": [keys, {"name": "tmp", "mountPath": TMP}, *part.mounts],
        **probes(pod.probes, part.startup_s),
    }


def _env(pod: PodPlan) -> list[Object]:
    """The pod's own variables first, then the plan's and the user's, which win. Theirs are taken as written."""
    given = {name: value.replace("$(", "$$(") for name, value in pod.env}
    own = {"HOME": TMP, "PYTHONUNBUFFERED": "1"}
    address: Object = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    values = {**own, **given}
    values.pop("POD_IP", None)  # the address to bind is no one's to choose
    return [address, *({"name": name, "value": value} for name, value in values.items())]


def _keys_volume(pod: PodPlan, secret: str) -> Object:
    """The key files that this role may hold: the router's volume has no ``kv``."""
    items = [{"key": key, "path": key} for key in pod.keys]
    return {"name": "keys", "secret": {"secretName": secret, "items": items, "defaultMode": KEY_MODE}}


def _scratch(size: str) -> Object:
    return {"name": "tmp", "emptyDir": {"sizeLimit": size}}


def _placement(chosen: PodSettings, marks: Mapping[str, str]) -> Object:
    """Where the pods run: as the manifest says; else spread over nodes as far as that goes."""
    placed: Object = {}
    if chosen.node_selector:
        placed["nodeSelector"] = dict(chosen.node_selector)
    if chosen.tolerations:
        placed["tolerations"] = [_plain(toleration) for toleration in chosen.tolerations]
    if chosen.affinity is not None:
        placed["affinity"] = _plain(chosen.affinity)
    if chosen.priority_class_name is not None:
        placed["priorityClassName"] = chosen.priority_class_name
    spread = [_plain(constraint) for constraint in chosen.topology_spread_constraints] or [
        {"topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
    ]
    placed["topologySpreadConstraints"] = [
        {**constraint, "labelSelector": {"matchLabels": dict(marks)}} for constraint in spread
    ]
    return placed


def _plain(model: Any) -> Object:
    dumped: Object = model.model_dump(by_alias=True, exclude_none=True)
    return dumped
