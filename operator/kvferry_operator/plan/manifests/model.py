"""The model in a pod: its volume, the container that fetches it, and the argument that names it to the engine."""

import msgspec

from kvferry_operator.api.quantities import parse_bytes
from kvferry_operator.api.service import Model
from kvferry_operator.api.source import ModelSource
from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.plan.manifests.security import KEY_MODE, container_security
from kvferry_operator.plan.models import GIB, MIB, facts_of, fetched_folder

FOLDER = "/models"
TOKEN_FOLDER = "/var/run/kvferry/hub"  # noqa: S105 - where a file is mounted
VOLUME, TOKEN_VOLUME = "models", "hub-token"
FETCH = "fetch-model"
UNKNOWN_SIZE = 256 * GIB  # a cap, not a reservation
FETCH_MEMORY = "512Mi"


class ModelMount(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod needs for its model."""

    argument: str  # for the engine's --model
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    init: tuple[Object, ...] = ()
    fetches: bool = False


def model_bytes(model: Model, source: ModelSource) -> int | None:
    """Size of the model's files: as the manifest says, else as is known."""
    if model.size is not None:
        return parse_bytes(model.size)
    facts = facts_of(source)
    return None if facts is None else facts.files


def model_mount(model: Model, source: ModelSource, image: str, pull_policy: str) -> ModelMount:
    """The model's part of a pod. Raises ``ValueError`` for a path, which no cluster has."""
    if source.kind == "toy":
        return ModelMount(argument=str(source))
    if source.kind == "pvc":
        volume = {"name": VOLUME, "persistentVolumeClaim": {"claimName": source.name, "readOnly": True}}
        inside = f"{FOLDER}/{source.inside}" if source.inside else FOLDER
        return ModelMount(argument=inside.rstrip("/"), volumes=(volume,), mounts=(_mount(read_only=True),))
    if source.kind == "image":
        volume = {"name": VOLUME, "image": {"reference": source.name, "pullPolicy": pull_policy}}
        return ModelMount(argument=FOLDER, volumes=(volume,), mounts=(_mount(read_only=True),))
    folder = fetched_folder(source)
    if folder is None:
        raise ValueError(f"spec.model.source: got {source}; a cluster has no such path")
    size = model_bytes(model, source)
    # A download lies beside what is unpacked from it.
    limit = UNKNOWN_SIZE if size is None else 2 * size + 256 * MIB
    volumes: list[Object] = [{"name": VOLUME, "emptyDir": {"sizeLimit": f"{-(-limit // MIB)}Mi"}}]
    if model.token_secret_ref is not None:
        items = [{"key": "token", "path": "token"}]
        secret = {"secretName": model.token_secret_ref.name, "items": items, "defaultMode": KEY_MODE}
        volumes.append({"name": TOKEN_VOLUME, "secret": secret})
    return ModelMount(
        argument=f"{FOLDER}/{folder}",
        volumes=tuple(volumes),
        mounts=(_mount(read_only=True),),
        init=(_fetcher(model, source, image, pull_policy),),
        fetches=True,
    )


def _fetcher(model: Model, source: ModelSource, image: str, pull_policy: str) -> Object:
    """The init container: fetches, verifies, ends. It alone holds the hub's token."""
    env = [{"name": "HOME", "value": "/tmp"}, {"name": "KVFERRY_MODELS", "value": FOLDER}]  # noqa: S108 - an emptyDir
    mounts = [_mount(read_only=False), {"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - an emptyDir
    if model.token_secret_ref is not None:
        env.append({"name": "HF_TOKEN_PATH", "value": f"{TOKEN_FOLDER}/token"})
        mounts.append({"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True})
    name = source.name if source.kind == "hub" and source.revision is None else str(source)
    return {
        "name": FETCH,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["python", "-P", "-m", "kvferry_cli"],
        "args": ["model", "fetch", "--quiet", name],
        "env": env,
        "resources": {"requests": {"cpu": "100m", "memory": FETCH_MEMORY}, "limits": {"memory": "2Gi"}},
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _mount(*, read_only: bool) -> Object:
    return {"name": VOLUME, "mountPath": FOLDER} | ({"readOnly": True} if read_only else {})
