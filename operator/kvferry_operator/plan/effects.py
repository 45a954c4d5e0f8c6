"""What is to be done in the cluster, as values. A shell does them in order and reports what was refused."""

from typing import Any

import msgspec

from kvferry_operator.plan.manifests.meta import Object


class Create(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Create; that one of its name exists already is done."""

    object: Object
    manager: str


class Apply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Server-side apply with force."""

    object: Object
    manager: str
    why: str  # for the log: what differs, or that it is missing


class Patch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """JSON merge patch. That the object is gone (404) is done."""

    api_version: str
    kind: str
    namespace: str
    name: str
    body: dict[str, Any]
    manager: str
    why: str


class Delete(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Delete this very object (precondition: uid), in the background. That it is gone (404) is done."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str
    why: str


Effect = Create | Apply | Patch | Delete


class ApplyFault(msgspec.Struct, frozen=True, kw_only=True):
    """An effect that the API server refused, or did not answer (code 0)."""

    kind: str
    name: str
    code: int
    message: str
