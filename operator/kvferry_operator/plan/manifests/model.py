"""The model in a pod: its volume, the container that fetches it, and the argument that names it to the engine."""

import msgspec

from kvferry_operator.api.quantities import parse_bytes
from kvferry_operator.api.service import Model
from kvferry_operator.api.source import ModelSource
from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.plan.manifests.security import KEY_MODE, container_security
from kvferry_operator.plan.models import GIB, MIB, facts_of, fetched_folder
from kvferry_wire.fetch import COMMIT_VARIABLE, FETCHED_NAME
from kvferry_wire.urls import parse_endpoint, parse_url

FOLDER = "/models"
VOLUME, TOKEN_VOLUME, S3_VOLUME = "models", "hub-token", "s3-credentials"
SECRET_FOLDERS = {TOKEN_VOLUME: "/var/run/kvferry/hub", S3_VOLUME: "/var/run/kvferry/s3"}
FETCH = "fetch-model"
REPORT_FILE = "/dev/termination-log"  # the kubelet's own file, writable also with a read-only root
UNKNOWN_SIZE = 256 * GIB  # a cap, not a reservation
VOLUME_SLACK = 256 * MIB
FETCH_MEMORY = "1Gi"  # request and limit; bytes on their way to the volume are few


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


class CommitNames(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pod that starts later finds the commit that the first ones got (``kvferry_operator.plan.commits``)."""

    config_map: str
    key: str


def model_mount(
    model: Model, source: ModelSource, image: str, pull_policy: str, names: CommitNames | None = None
) -> ModelMount:
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
    limit = _volume_bytes(model, source)
    volumes: list[Object] = [{"name": VOLUME, "emptyDir": {"sizeLimit": f"{limit // MIB}Mi"}}]
    for name, held, keys in _secrets(model, source):
        items = [{"key": key, "path": key} for key in keys]
        # Where a Secret has more or less entries than may be there, what is there is mounted.
        secret = {"secretName": held, "defaultMode": KEY_MODE} | ({"items": items} if items else {})
        volumes.append({"name": name, "secret": secret})
    return ModelMount(
        argument=f"{FOLDER}/{folder}",
        volumes=tuple(volumes),
        mounts=(_mount(read_only=True),),
        init=(_fetcher(model, source, image, pull_policy, names),),
        fetches=True,
    )


def store_ports(model: Model, source: ModelSource, default: tuple[int, ...]) -> tuple[int, ...]:
    """The ports at which a model is fetched; none where it is not."""
    if fetched_folder(source) is None:
        return ()
    address = source.name if source.kind == "web" else None if model.s3 is None else model.s3.endpoint
    if address is None:
        return default
    try:
        own = parse_url(address).port if source.kind == "web" else parse_endpoint(address).port
    except ValueError:
        return default  # what fetches will say so
    return default if own in default else (*default, own)


def _volume_bytes(model: Model, source: ModelSource) -> int:
    size = model_bytes(model, source)
    if size is None:
        return UNKNOWN_SIZE
    # The demo's wheel lies beside what is unpacked from it.
    needed = 2 * size if source.kind == "demo" else size + size // 16
    return -(-(needed + VOLUME_SLACK) // MIB) * MIB


def _secrets(model: Model, source: ModelSource) -> list[tuple[str, str, tuple[str, ...]]]:
    """Volumes of Secrets that the fetching container mounts: name, Secret, entries (none given: all)."""
    found: list[tuple[str, str, tuple[str, ...]]] = []
    if model.token_secret_ref is not None:
        found.append((TOKEN_VOLUME, model.token_secret_ref.name, ("token",)))
    if source.kind == "s3" and model.s3 is not None and model.s3.secret_ref is not None:
        found.append((S3_VOLUME, model.s3.secret_ref.name, ()))
    return found


def _fetcher(model: Model, source: ModelSource, image: str, pull_policy: str, names: CommitNames | None) -> Object:
    """The init container: fetches, verifies, reports, ends. It alone holds tokens and credentials of the source.

    Its exit status and its last line say why it failed (``kvferry_wire.fetch``), its termination message what it got.
    """
    mounts = [_mount(read_only=False), {"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - an emptyDir
    mounts += [
        {"name": name, "mountPath": SECRET_FOLDERS[name], "readOnly": True} for name, *_ in _secrets(model, source)
    ]
    # What is left of the volume is for links, notes and the file system's own.
    most = _volume_bytes(model, source) - VOLUME_SLACK // 2
    args = ["model", "fetch", "--link", FETCHED_NAME, "--report", REPORT_FILE, "--max-bytes", str(most), str(source)]
    return {
        "name": FETCH,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["python", "-P", "-m", "kvferry_cli"],
        "args": args,
        "env": _fetch_env(model, source, names),
        "resources": {"requests": {"cpu": "100m", "memory": FETCH_MEMORY}, "limits": {"memory": FETCH_MEMORY}},
        "securityContext": container_security(),
        "terminationMessagePath": REPORT_FILE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _fetch_env(model: Model, source: ModelSource, names: CommitNames | None) -> list[Object]:
    values = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1", "KVFERRY_MODELS": FOLDER}  # noqa: S108 - an emptyDir
    if model.token_secret_ref is not None:
        variable = "KVFERRY_TOKEN_FILE" if source.kind == "web" else "HF_TOKEN_PATH"
        values[variable] = f"{SECRET_FOLDERS[TOKEN_VOLUME]}/token"
    if source.kind == "s3" and model.s3 is not None:
        if model.s3.secret_ref is not None:
            values["KVFERRY_S3_CREDENTIALS"] = SECRET_FOLDERS[S3_VOLUME]
        if model.s3.endpoint is not None:
            values["AWS_ENDPOINT_URL_S3"] = model.s3.endpoint
        if model.s3.region is not None:
            values["AWS_REGION"] = model.s3.region
    env: list[Object] = [{"name": name, "value": value} for name, value in values.items()]
    if names is not None:
        chosen = {"name": names.config_map, "key": names.key, "optional": True}
        env.append({"name": COMMIT_VARIABLE, "valueFrom": {"configMapKeyRef": chosen}})
    return env


def _mount(*, read_only: bool) -> Object:
    return {"name": VOLUME, "mountPath": FOLDER} | ({"readOnly": True} if read_only else {})
