"""Builders of manifests for the operator's tests."""

import copy
from typing import Any

import yaml

from kvferry_operator.api import InferenceService, load_manifest

BASE: dict[str, Any] = {
    "apiVersion": "serving.kvferry.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"name": "tiny", "source": "toy"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
        "router": {"auth": "none"},
    },
}


def make_manifest(**changes: Any) -> dict[str, Any]:
    """The base manifest with values set at dotted paths (``__`` for the dot); ``...`` removes the field.

    Nothing in it is shared: whoever changes the manifest changes no table that the values came from.
    """
    manifest = copy.deepcopy(BASE)
    for path, value in changes.items():
        holder: Any = manifest
        *parents, leaf = path.split("__")
        for part in parents:
            holder = holder.setdefault(part, {})
        if value is ...:
            del holder[leaf]
        else:
            holder[leaf] = copy.deepcopy(value)
    return manifest


def make_service(**changes: Any) -> InferenceService:
    """The loaded manifest with changes as in ``make_manifest``."""
    return load_manifest(yaml.safe_dump(make_manifest(**changes)), "test.yaml")
