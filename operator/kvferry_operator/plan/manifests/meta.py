"""What every object of a service has in common: labels, owner, and who wrote it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry_operator.api.service import API_VERSION, KIND

Object = dict[str, Any]

FIELD_MANAGER = "kvferry-operator"  # of everything that is applied
SEED_MANAGER = "kvferry-seed"  # of what is written once and then others' to change: replicas of a role object
NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
REVISION = "serving.kvferry.dev/revision"
APPLIED = "serving.kvferry.dev/applied"  # annotation: hash of the object as it was applied
SEEDED = "serving.kvferry.dev/seeded-replicas"  # annotation of a role object: the manifest's number written last


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The InferenceService that objects belong to, as the API server knows it."""

    name: str
    namespace: str
    uid: str
    generation: int

    def reference(self) -> Object:
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def labels(service: str, component: str | None = None, revision: str | None = None) -> dict[str, str]:
    """The labels of an object."""
    made = {NAME: "kvferry", INSTANCE: service, MANAGED_BY: "kvferry", PART_OF: "kvferry"}
    if component is not None:
        made[COMPONENT] = component
    if revision is not None:
        made[REVISION] = revision
    return made


def selector(service: str, component: str | None = None, revision: str | None = None) -> dict[str, str]:
    """The labels by which a service's pods are found. A Deployment's selector cannot change later."""
    made = {NAME: "kvferry", INSTANCE: service}
    if component is not None:
        made[COMPONENT] = component
    if revision is not None:
        made[REVISION] = revision
    return made


def selector_text(chosen: Mapping[str, str]) -> str:
    """A selector as text, as /scale tells it to autoscalers."""
    return ",".join(f"{key}={value}" for key, value in sorted(chosen.items()))


def make_object(
    api_version: str,
    kind: str,
    name: str,
    owner: Owner,
    body: Mapping[str, Any],
    *,
    component: str | None = None,
    revision: str | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """An object of a service: its metadata, then ``body``."""
    metadata: Object = {
        "name": name,
        "namespace": owner.namespace,
        "labels": labels(owner.name, component, revision),
        "ownerReferences": [owner.reference()],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
