"""What is known of models before their files are there."""

import msgspec

from kvferry_operator.api.source import ModelSource, SourceKind
from kvferry_wire.fetch import FETCHED_NAME

MIB = 2**20
GIB = 2**30


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model, in bytes."""

    files: int
    weights: int  # in memory, float32
    kv_per_token: int  # all layers, K and V, float32


# The demo models of kvferry_runtime.model.fetch; a test compares the names.
DEMO_MODELS: dict[str, ModelFacts] = {
    "smollm2": ModelFacts(
        files=83 * MIB,
        weights=134_515_008 * 4,
        kv_per_token=30 * 2 * 3 * 64 * 4,  # layers, K and V, KV heads, dimensions, bytes
    ),
}
TOY = ModelFacts(files=0, weights=0, kv_per_token=64)


def facts_of(source: ModelSource) -> ModelFacts | None:
    """What is known of a source's model; ``None`` where only its files can tell."""
    if source.kind == "toy":
        return TOY
    return DEMO_MODELS.get(source.name) if source.kind == "demo" else None


FETCHED_KINDS: frozenset[SourceKind] = frozenset({"demo", "hub", "web", "s3"})


def fetched_folder(source: ModelSource) -> str | None:
    """What a fetched model is called below the pod's folder of models; ``None`` for what is not fetched."""
    return FETCHED_NAME if source.kind in FETCHED_KINDS else None
