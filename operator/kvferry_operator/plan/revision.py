"""The revision: a hash of the spec fields that change what an engine pod computes or how it lays out KV.

Both tables together name every field of the spec (a test compares them with the types), so that a new field is
placed on purpose.
"""

import hashlib
from typing import Any

import msgspec

from kvferry_operator.api.service import InferenceServiceSpec

# Field -> why another value needs other pods.
REVISION_FIELDS: dict[str, str] = {
    "model.name": "the served name is an argument of each engine",
    "model.source": "other weights, other KV",
    "model.s3.endpoint": "another store, other weights",
    "engine": "how KV is computed and laid out",
    "prefill.engine": "how KV is computed and laid out",
    "prefill.env": "may change what is computed",
    "prefill.image": "other code",
    "prefill.resources": "sizes threads and KV memory",
    "decode.engine": "how KV is computed and laid out",
    "decode.env": "may change what is computed",
    "decode.image": "other code",
    "decode.resources": "sizes threads and KV memory",
    "transfer.backend": "how KV is ferried; both sides must agree",
    "transfer.lease": "how KV is ferried; both sides must agree",
    "transfer.checksums": "an argument of each engine",
    "transfer.trustNetwork": "how KV is ferried; both sides must agree",
}

# Field -> why the same pods serve on.
OTHER_FIELDS: dict[str, str] = {
    "prefill.replicas": "scale only",
    "decode.replicas": "scale only",
    **{
        f"{role}.{field}": "where a pod runs and how it is marked, not what it computes"
        for role in ("prefill", "decode")
        for field in (
            "nodeSelector",
            "tolerations",
            "affinity",
            "topologySpreadConstraints",
            "priorityClassName",
            "labels",
            "annotations",
        )
    },
    "router": "the router computes no KV",
    "transfer.failurePolicy": "the router's decision, which it sends along with each leg",
    "model.size": "sizes the pod, not what it computes",
    "model.tokenSecretRef": "how the same weights are got",
    "model.s3.region": "where the same bucket is",
    "model.s3.secretRef": "how the same weights are got",
}


def revision(spec: InferenceServiceSpec) -> str:
    """Ten hex digits, equal exactly where the fields of the table are equal.

    The commit that a branch of a hub stands for is not among them: it becomes known only once pods run, and is kept for
    those that follow (``plan.manifests.commits``).
    """
    values = spec.model_dump(by_alias=True, exclude_none=True)
    chosen = {field: _at(values, field) for field in REVISION_FIELDS}
    canonical = msgspec.json.encode({"fields": chosen}, order="deterministic")
    return hashlib.sha256(canonical).hexdigest()[:10]


def _at(values: dict[str, Any], field: str) -> Any:
    found: Any = values
    for part in field.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return _pruned(found)


def _pruned(value: Any) -> Any:
    """The value without empty parts: a pool that is absent and one without settings compute alike."""
    if isinstance(value, dict):
        return {name: kept for name, inner in value.items() if (kept := _pruned(inner)) is not None} or None
    return None if value == [] else value
