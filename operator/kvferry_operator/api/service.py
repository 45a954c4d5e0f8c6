"""``InferenceService`` (serving.kvferry.dev/v1alpha1): what a user asks for."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvferry_operator.api.base import (
    ACCEPTS,
    DNS_LABEL,
    Annotations,
    Bytes,
    DnsName,
    Labels,
    LeaseDuration,
    ManifestModel,
    SecretReference,
    Source,
    raise_broken,
)
from kvferry_operator.api.pods import PodSettings
from kvferry_operator.api.router import Router

API_VERSION = "serving.kvferry.dev/v1alpha1"
KIND = "InferenceService"
MAX_REPLICAS = 64

EngineRoleName = Literal["prefill", "decode"]


class Metadata(ManifestModel):
    """The object's name and marks, as in Kubernetes."""

    name: Annotated[
        str,
        Field(
            pattern=DNS_LABEL,
            min_length=1,
            max_length=63,
            json_schema_extra={
                ACCEPTS: "a name of at most 63 lower-case letters, digits and '-', a letter or digit at both ends"
            },
        ),
    ]
    """The service's name; the names of all that belongs to it start with it."""

    namespace: DnsName | None = None
    """The Kubernetes namespace. Without a meaning on one machine."""

    labels: Labels = Field(default_factory=dict)
    """Labels of the object."""

    annotations: Annotations = Field(default_factory=dict)
    """Annotations of the object."""


class S3Settings(ManifestModel):
    """How the bucket of an `s3://` source is reached."""

    endpoint: (
        Annotated[
            str,
            Field(
                pattern=r"^https?://[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(:[0-9]{1,5})?/?$",
                max_length=300,
                json_schema_extra={ACCEPTS: "an address such as https://minio.example.com:9000"},
            ),
        ]
        | None
    ) = None
    """The store's address, of MinIO and the like. Absent: AWS."""

    region: (
        Annotated[
            str,
            Field(pattern=r"^[a-z0-9-]+$", max_length=63, json_schema_extra={ACCEPTS: "a region such as eu-west-3"}),
        ]
        | None
    ) = None
    """The bucket's region. Absent: as the store says."""

    secret_ref: SecretReference | None = None
    """On Kubernetes: the Secret with the entries `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and, where they are
    temporary, `AWS_SESSION_TOKEN`. Only the container that fetches holds it. Absent: requests are not signed, as public
    buckets want it. On one machine credentials are found as by AWS's own tools."""


class Model(ManifestModel):
    """Which model is served, and where it comes from."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
            min_length=1,
            max_length=128,
            json_schema_extra={ACCEPTS: "a name of at most 128 letters, digits, '.', '_', ':', '/' or '-'"},
        ),
    ]
    """The name that clients ask for, as in `"model": ...` of a request."""

    source: Source
    """Where the model comes from: `demo:smollm2` (a small model that needs no account), a hub id (`org/name` or
    `hf://org/name@revision`), a folder on a web server with a model as Hugging Face lays it out (`https://HOST/FOLDER/`)
    or the address of a .gguf file, optionally with `#sha256=HEX`, a prefix of a bucket (`s3://BUCKET/PREFIX`), a local
    folder or GGUF file (`./model`, taken from the manifest's folder; on one machine
    only), a volume or image of a cluster (`pvc://CLAIM/PATH`, `image://REFERENCE`), or `toy:` (a model for tests that
    computes exact integers)."""

    size: Bytes | None = None
    """Bytes of the model's files, such as `14Gi`: on Kubernetes the size of the volume that they are fetched into, and
    what memory is asked for where `resources` says nothing. Absent: known for demo models, else no memory is asked."""

    token_secret_ref: SecretReference | None = None
    """On Kubernetes: the Secret whose entry `token` opens a gated model of a hub, or is sent to a web server over
    https. Only the container that fetches holds it."""

    s3: S3Settings | None = None
    """How the bucket of an `s3://` source is reached."""

    @model_validator(mode="after")
    def _rules(self) -> "Model":
        if self.s3 is not None and not self.source.startswith("s3://"):
            raise_broken([("s3", "the source is no bucket; accepts it with s3://BUCKET/PREFIX only")])
        return self


class EngineSettings(ManifestModel):
    """Settings of an engine. An absent field is the engine's own default, which it logs at its start."""

    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """Type of weights and KV. `auto` is float32 on a CPU without fast bfloat16. Absent: `auto`."""

    max_model_len: Annotated[int, Field(ge=8, le=2**24)] | None = None
    """Most tokens of prompt and answer together. Absent: what the model was trained for."""

    block_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Tokens of one KV block; the same for prefill and decode."""

    kv_blocks: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """KV memory as a number of blocks; excludes `kvMemory`."""

    kv_memory: Bytes | None = None
    """KV memory as a quantity of bytes, such as `512Mi`; excludes `kvBlocks`."""

    max_running: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most sequences in the running batch."""

    token_budget: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Most tokens that one step computes, of prefill and decode together."""

    prefix_caching: bool | None = None
    """Whether KV of a prompt's beginning is used again by later requests. Absent: true."""

    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads of each engine. Absent: the machine's cores shared among the engines."""

    attention_backend: Literal["auto", "torch"] | None = None
    """How attention is computed. Absent: `auto`."""

    @model_validator(mode="after")
    def _rules(self) -> "EngineSettings":
        broken: list[tuple[str, str]] = []
        if self.kv_blocks is not None and self.kv_memory is not None:
            broken.append(("kvMemory", "kvBlocks is given too; accepts one of the two"))
        budget, running = self.token_budget, self.max_running
        if budget is not None and running is not None and budget < running:
            broken.append(("tokenBudget", f"got {budget}; accepts at least maxRunning ({running})"))
        raise_broken(broken)
        return self

    def over(self, base: "EngineSettings") -> "EngineSettings":
        """These settings where given, else those of ``base``. The two forms of KV memory replace each other.

        Rules between fields are not looked at: ``InferenceServiceSpec`` holds those between a pool's and the base's.
        """
        own = {name: value for name in EngineSettings.model_fields if (value := getattr(self, name)) is not None}
        memory: dict[str, None] = dict.fromkeys(
            ("kv_blocks", "kv_memory") if {"kv_blocks", "kv_memory"} & own.keys() else ()
        )
        return base.model_copy(update=memory | own)

    def batch_fault(self, base: "EngineSettings") -> tuple[str, str] | None:
        """The field of these settings at which, over ``base``, a step cannot hold the running batch; and what is wrong.

        ``None`` also where both fields are of one side, whose own rule says it.
        """
        budget, running = self.token_budget, self.max_running
        if budget is not None and running is None and base.max_running is not None and budget < base.max_running:
            return "tokenBudget", f"got {budget}; accepts at least maxRunning of spec.engine ({base.max_running})"
        if running is not None and budget is None and base.token_budget is not None and running > base.token_budget:
            return "maxRunning", f"got {running}; accepts at most tokenBudget of spec.engine ({base.token_budget})"
        return None


class EngineRole(PodSettings):
    """A pool of engine pods."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Number of pods in the pool."""

    engine: EngineSettings = EngineSettings()
    """Engine settings of this pool; they win over `spec.engine`."""


class Transfer(ManifestModel):
    """How KV is ferried from prefill to decode."""

    backend: Literal["auto", "tcp", "nixl", "mooncake"] = "auto"
    """The transport. `auto` is `tcp`; `nixl` and `mooncake` are reserved names and refused until they are built."""

    lease: LeaseDuration | None = None
    """How long a prefill pod keeps blocks for a decode pod that does not renew. Absent: 15 s."""

    trust_network: bool = False
    """Whether transports that cannot authenticate their peers may be chosen; `tcp` does not need it."""

    checksums: bool = True
    """Whether each ferried block has a checksum (XXH3, 64 bits), made by the pod that computed it and checked by the
    one that reads it: a byte that changed on its way or in memory costs a recompute, never a wrong token. Without
    them a transfer takes less CPU (`benchmarks/transfer.py` says how much), and what TCP's own 16 bits let pass is not
    found."""

    failure_policy: Literal["recompute", "retry", "fail"] = "recompute"
    """What is done when KV cannot be ferried. `recompute`: the decode pod computes the prompt itself. `retry`: other
    prefill pods are tried before that, and waited for while they are full. `fail`: they are tried, and then the request
    fails; an answer that has begun is continued all the same."""

    @model_validator(mode="after")
    def _rules(self) -> "Transfer":
        if self.backend in ("nixl", "mooncake"):
            raise_broken([("backend", f"{self.backend} is not built yet; accepts auto or tcp")])
        return self


class InferenceServiceSpec(ManifestModel):
    """What is asked for."""

    model: Model
    """The model."""

    engine: EngineSettings = EngineSettings()
    """Engine settings of both pools."""

    prefill: EngineRole | None = None
    """The pool that computes prompts. Absent or 0 replicas: decode pods do the whole work."""

    decode: EngineRole
    """The pool that writes answers."""

    router: Router
    """The endpoint in front of the pools."""

    transfer: Transfer = Transfer()
    """How KV is ferried."""

    def engine_of(self, role: EngineRoleName) -> EngineSettings:
        """The effective engine settings of a pool."""
        pool = self.decode if role == "decode" else self.prefill
        return self.engine if pool is None else pool.engine.over(self.engine)

    @property
    def prefill_replicas(self) -> int:
        """Number of prefill pods; 0 where the pool is absent."""
        return 0 if self.prefill is None else self.prefill.replicas

    @model_validator(mode="after")
    def _rules(self) -> "InferenceServiceSpec":
        broken: list[tuple[str, str]] = []
        for role, pool in (("prefill", self.prefill), ("decode", self.decode)):
            fault = None if pool is None else pool.engine.batch_fault(self.engine)
            if fault is not None:
                broken.append((f"{role}.engine.{fault[0]}", fault[1]))
        if self.prefill is not None:
            prefill, decode = self.engine_of("prefill"), self.engine_of("decode")
            for field, ours, theirs in (
                ("blockSize", prefill.block_size, decode.block_size),
                ("dtype", prefill.dtype or "auto", decode.dtype or "auto"),
            ):
                if ours != theirs:
                    told = f"must be equal for prefill and decode to ferry KV; got {_shown(ours)} and {_shown(theirs)}"
                    broken.append((f"prefill.engine.{field}", told))
        if self.router.disaggregation.mode == "always" and self.prefill_replicas == 0:
            broken.append(("router.disaggregation.mode", "always needs a prefill pool; spec.prefill.replicas is 0"))
        raise_broken(broken)
        return self


def _shown(value: object) -> str:
    return "the engine's default" if value is None else str(value)


class InferenceService(ManifestModel):
    """A model served by a prefill pool, a decode pool and a router."""

    api_version: Literal["serving.kvferry.dev/v1alpha1"]
    """The version of these types."""

    kind: Literal["InferenceService"]
    """The kind of this object."""

    metadata: Metadata
    """Name and marks of the service."""

    spec: InferenceServiceSpec
    """What is asked for."""
