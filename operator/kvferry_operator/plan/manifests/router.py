"""The router's pods. They watch the EndpointSlices of the pools' Services and read the clients' keys from a Secret."""

import math

import msgspec

from kvferry_operator.api.quantities import format_seconds
from kvferry_operator.plan.manifests.context import Context
from kvferry_operator.plan.manifests.deployment import deployment
from kvferry_operator.plan.manifests.meta import Object, Owner
from kvferry_operator.plan.manifests.names import keys_name, service_name
from kvferry_operator.plan.manifests.pod import Part, arguments, pod_template
from kvferry_operator.plan.manifests.security import KEY_MODE
from kvferry_operator.plan.pods import PodPlan, Slot
from kvferry_operator.plan.resources import router_resources
from kvferry_operator.plan.router import request_deadline_s

STARTUP_S = 60.0
END_S = 15  # for a router's end beside its requests, with what it lingers before
TMP = "256Mi"
API_KEYS_FOLDER = "/var/run/kvferry/api-keys"  # one file per client; the kubelet exchanges them when the Secret changes
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - where clients of the API look
TOKEN_LIFE_S = 3600
PODS_FLAG = "--pods-file"


def router_deployment(context: Context, pod: PodPlan, replicas: int) -> Object:
    """The Deployment of the router."""
    owner, settings, chosen = context.owner, context.settings, context.service.spec.router
    volumes: list[Object] = [_token_volume()]
    mounts: list[Object] = [{"name": "api-token", "mountPath": TOKEN_FOLDER, "readOnly": True}]
    if chosen.api_keys is not None and chosen.api_keys.secret_ref is not None:
        secret = {"secretName": chosen.api_keys.secret_ref.name, "defaultMode": KEY_MODE}
        volumes.append({"name": "api-keys", "secret": secret})
        mounts.append({"name": "api-keys", "mountPath": API_KEYS_FOLDER, "readOnly": True})
    # Nobody can take an answer over from a router: one that ends waits as long as a request may last.
    drain_s = request_deadline_s(chosen)
    argv = arguments(_with_cluster_discovery(pod, owner), {Slot.API_KEYS_FILE: API_KEYS_FOLDER})
    part = Part(
        image=pod.image or settings.router_image,
        argv=(*argv, "--drain", format_seconds(drain_s)),
        resources=router_resources(pod).rendered(),
        startup_s=STARTUP_S,
        grace_s=math.ceil(drain_s) + END_S,
        service_account=settings.router_service_account,
        keys_secret=keys_name(owner.name, owner.uid),
        tmp=TMP,
        volumes=tuple(volumes),
        mounts=tuple(mounts),
    )
    return deployment(context, pod, pod_template(context, pod, chosen, part), replicas=replicas, startup_s=STARTUP_S)


def _with_cluster_discovery(pod: PodPlan, owner: Owner) -> PodPlan:
    """The router's plan with the pods file of one machine replaced by the Services whose EndpointSlices it watches."""
    argv = list(pod.argv)
    at = argv.index(PODS_FLAG)
    watched = [f"--watch-{role}={owner.namespace}/{service_name(owner.name, role)}" for role in ("prefill", "decode")]
    argv[at : at + 2] = watched
    return msgspec.structs.replace(pod, argv=tuple(argv))


def _token_volume() -> Object:
    """The ServiceAccount's token as a volume of its own: short-lived, and mounted where it is used only."""
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_LIFE_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]
    return {"name": "api-token", "projected": {"sources": sources, "defaultMode": KEY_MODE}}
