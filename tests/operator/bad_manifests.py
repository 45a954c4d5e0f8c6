"""Manifests that must be refused: by the loader of `kvferry up` and by an API server that has the CRD.

One table for both. ``words`` stand in the loader's fault and in the API server's answer; where the API server has a
check of its own for it (a bound, a type), ``api`` are its words.
"""

from typing import Any, Literal

import msgspec

from tests.operator.manifests import make_manifest


class Bad(msgspec.Struct, frozen=True, kw_only=True):
    """One bad manifest."""

    changes: dict[str, Any]  # as `make_manifest` takes them
    field: str  # the field at fault, as both name it
    words: str
    api: str | None = None  # None: the same words
    api_at: str | None = None  # None: the same field
    only: Literal["both", "cluster", "machine"] = "both"

    def manifest(self) -> dict[str, Any]:
        return make_manifest(**self.changes)

    @property
    def api_field(self) -> str:
        return self.field if self.api_at is None else self.api_at

    @property
    def api_words(self) -> str:
        return self.words if self.api is None else self.api

    def __str__(self) -> str:
        return f"{self.field or 'object'}: {self.words[:40]}"


def _bad(field: str, words: str, api: str | None = None, *, at: str | None = None, **changes: Any) -> Bad:
    return Bad(changes=changes, field=field, words=words, api=api, api_at=at)


def _cluster(field: str, words: str, **changes: Any) -> Bad:
    return Bad(changes=changes, field=field, words=words, only="cluster")


LONG = "a" * 64
KEYS = {"secretRef": {"name": "keys"}}

VALUES: tuple[Bad, ...] = (
    _bad(
        "spec.decode.replicas", "accepts an integer from 0 to 64", "less than or equal to 64", spec__decode__replicas=65
    ),
    _bad(
        "spec.decode.replicas",
        "accepts an integer from 0 to 64",
        "greater than or equal to 0",
        spec__decode__replicas=-1,
    ),
    _bad(
        "spec.decode.replicas", "accepts an integer from 0 to 64", "must be of type integer", spec__decode__replicas="2"
    ),
    _bad("spec.decode", "missing; accepts a mapping", "Required value", spec__decode=...),
    _bad("spec.model", "missing; accepts a mapping", "Required value", spec__model=...),
    _bad("spec.model.name", "missing; accepts a name", "Required value", spec__model={"source": "toy"}),
    _bad("spec.router", "missing; accepts a mapping", "Required value", spec__router=...),
    _bad(
        "spec.router.port",
        "accepts an integer from 1 to 65535",
        "less than or equal to 65535",
        spec__router__port=99999,
    ),
    _bad("spec.router.auth", "accepts none or apiKeys", "Unsupported value", spec__router__auth="open"),
    _bad("spec.engine.dtype", "accepts auto, float32 or bfloat16", "Unsupported value", spec__engine={"dtype": "fp8"}),
    _bad(
        "spec.engine.maxModelLen",
        "accepts an integer from 8",
        "greater than or equal to 8",
        spec__engine={"maxModelLen": 1},
    ),
    _bad(
        "spec.engine.kvMemory",
        "accepts a number of bytes such as 512Mi or 2Gi",
        "should match",
        spec__engine={"kvMemory": "much"},
    ),
    _bad(
        "spec.engine.kvMemory", "accepts a number of bytes", "greater than or equal to 1", spec__engine={"kvMemory": 0}
    ),
    _bad(
        "spec.engine.max_model_len", 'did you mean "maxModelLen"?', "unknown field", spec__engine={"max_model_len": 9}
    ),
    _bad(
        "spec.decode.resources.limits.cpu",
        "accepts a quantity such as 2, 500m or 4Gi",
        "should match",
        spec__decode__resources={"limits": {"cpu": "two"}},
    ),
    _bad(
        "spec.router.disaggregation.maxCachedShare",
        "accepts a number from 0 to 1",
        "less than or equal to 1",
        spec__router__disaggregation={"maxCachedShare": 2},
    ),
    _bad(
        "spec.transfer.failurePolicy",
        "accepts recompute, retry or fail",
        "Unsupported value",
        spec__transfer={"failurePolicy": "panic"},
    ),
    _bad(
        "spec.decode.env[1].name",
        '"A" is given twice',
        "Duplicate value",
        at="spec.decode.env[1]",
        spec__decode__env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
    ),
)

WORDS: tuple[Bad, ...] = (
    _bad("metadata.name", "accepts a name of at most 63 lower-case letters, digits and '-'", metadata__name="Demo"),
    _bad("spec.model.name", "accepts a name of at most 128 letters, digits", spec__model__name="a b"),
    _bad("spec.model.source", "accepts demo:NAME (demo:smollm2), a hub id", spec__model__source="ftp:x"),
    _bad("spec.transfer.lease", "accepts a duration from 1s to 10m", spec__transfer={"lease": "0s"}),
    _bad("spec.transfer.lease", "accepts a duration from 1s to 10m", spec__transfer={"lease": "ten"}),
    _bad("spec.router.requestDeadline", "accepts a duration from 1s to 24h", spec__router__requestDeadline="25h"),
    _bad("spec.decode.image", "accepts an image reference such as registry/name:tag", spec__decode__image="a b"),
    _bad("spec.decode.env[0].name", "accepts a variable's name", spec__decode__env=[{"name": "1A", "value": ""}]),
    _bad("spec.decode.nodeSelector", "accepts a label key such as team", spec__decode__nodeSelector={"a b": "c"}),
    _bad(
        "spec.decode.labels.team",
        "accepts a label value: at most 63",
        at="spec.decode.labels[team]",
        spec__decode__labels={"team": "a b"},
    ),
    _bad(
        "spec.decode.resources.limits",
        "accepts a resource's name such as cpu, memory or nvidia.com/gpu",
        spec__decode__resources={"limits": {"gpu": 1}},
    ),
    _bad(
        "spec.router.nodeSelector",
        "accepts a label key such as team or example.com/team",
        spec__router__nodeSelector={"a" * 254: "b"},
    ),
    _bad(
        "spec.router.ingress.host", "accepts a host name such as llm.example.com", spec__router__ingress={"host": "A"}
    ),
)

_SOURCES = (
    "https://models.example.com/m",
    "https://user:pass@models.example.com/m/",
    "https://models.example.com/m/?token=x",
    "https://models.example.com/m.gguf#sha256=abc",
    "https://models.example.com:port/m/",
    "s3://Models/m",
    "s3://models/m?x=y",
    "file:///models/m/",
)
WORDS += tuple(
    _bad("spec.model.source", "accepts demo:NAME (demo:smollm2), a hub id", spec__model__source=source)
    for source in _SOURCES
)
WORDS += (
    _bad(
        "spec.model.s3.endpoint",
        "accepts an address such as https://minio.example.com:9000",
        spec__model={"name": "m", "source": "s3://models/m", "s3": {"endpoint": "https://minio/path"}},
    ),
    _bad(
        "spec.model.s3.region",
        "accepts a region such as eu-west-3",
        spec__model={"name": "m", "source": "s3://models/m", "s3": {"region": "EU West"}},
    ),
)

RULES: tuple[Bad, ...] = (
    _bad(
        "spec.model.s3",
        "the source is no bucket; accepts it with s3://BUCKET/PREFIX only",
        spec__model={"name": "m", "source": "org/m", "s3": {"region": "eu-west-3"}},
    ),
    _bad(
        "spec.engine.kvMemory",
        "kvBlocks is given too; accepts one of the two",
        spec__engine={"kvBlocks": 9, "kvMemory": "1Gi"},
    ),
    _bad(
        "spec.decode.engine.tokenBudget",
        "accepts at least maxRunning",
        spec__decode__engine={"tokenBudget": 4, "maxRunning": 8},
    ),
    _bad(
        "spec.prefill.engine.tokenBudget",
        "accepts at least maxRunning of spec.engine",
        spec__engine={"maxRunning": 8},
        spec__prefill__engine={"tokenBudget": 4},
    ),
    _bad(
        "spec.decode.engine.maxRunning",
        "accepts at most tokenBudget of spec.engine",
        spec__prefill=...,
        spec__engine={"tokenBudget": 8},
        spec__decode__engine={"maxRunning": 9},
    ),
    _bad(
        "spec.prefill.engine.maxRunning",
        "accepts at most tokenBudget of spec.engine",
        spec__engine={"tokenBudget": 8},
        spec__prefill__engine={"maxRunning": 9},
    ),
    _bad(
        "spec.decode.engine.tokenBudget",
        "accepts at least maxRunning of spec.engine",
        spec__engine={"maxRunning": 8},
        spec__decode__engine={"tokenBudget": 4},
    ),
    _bad("spec.router.apiKeys", "missing; auth apiKeys (the default) needs it", spec__router={"port": 8000}),
    _bad(
        "spec.router.apiKeys",
        "auth is none, which uses no keys; accepts it with auth apiKeys only",
        spec__router={"auth": "none", "apiKeys": KEYS},
    ),
    _bad("spec.router.apiKeys", "empty; accepts secretRef, keysFile or both", spec__router={"apiKeys": {}}),
    _bad(
        "spec.router.disaggregation.minUncachedTokens",
        "mode is never, which uses no threshold; accepts it with mode auto only",
        spec__router__disaggregation={"mode": "never", "minUncachedTokens": 3},
    ),
    _bad(
        "spec.router.disaggregation.maxCachedShare",
        "mode is always, which uses no threshold; accepts it with mode auto only",
        spec__router__disaggregation={"mode": "always", "maxCachedShare": 0.5},
    ),
    _bad(
        "spec.router.disaggregation.mode",
        "always needs a prefill pool; spec.prefill.replicas is 0",
        spec__prefill=...,
        spec__router__disaggregation={"mode": "always"},
    ),
    _bad("spec.transfer.backend", "nixl is not built yet; accepts auto or tcp", spec__transfer={"backend": "nixl"}),
    _bad(
        "spec.prefill.engine.blockSize",
        "must be equal for prefill and decode to ferry KV",
        spec__prefill__engine={"blockSize": 32},
    ),
    _bad(
        "spec.prefill.engine.dtype",
        "must be equal for prefill and decode to ferry KV",
        spec__decode__engine={"dtype": "float32"},
    ),
    _bad(
        "spec.decode.tolerations[0].value",
        "operator Exists takes no value",
        spec__decode__tolerations=[{"key": "a", "operator": "Exists", "value": "b"}],
    ),
    _bad("spec.router.tolerations[0].key", "missing; operator Equal needs a key", spec__router__tolerations=[{}]),
    _bad(
        'spec.decode.labels["app.kubernetes.io/name"]',
        "labels of this domain are the operator's own",
        at="spec.decode.labels",
        spec__decode__labels={"app.kubernetes.io/name": "x"},
    ),
)

CLUSTER: tuple[Bad, ...] = (
    _cluster("spec.model.source", "a path of one machine; on a cluster accepts", spec__model__source="./model"),
    _cluster(
        "spec.router.apiKeys.secretRef",
        "missing; on a cluster API keys are read from a Secret",
        spec__router={"apiKeys": {"keysFile": "keys"}},
    ),
)

# Updates of the base manifest that an API server must refuse.
IMMUTABLE: tuple[Bad, ...] = (
    _cluster("spec.model.name", "cannot be changed: clients ask for this name", spec__model__name="other"),
)

BAD_MANIFESTS: tuple[Bad, ...] = (*VALUES, *WORDS, *RULES, *CLUSTER)
