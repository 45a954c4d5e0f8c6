"""What was seen of the cluster, newest version of each object. Pure: no I/O.

Objects are kept encoded, without what the decisions never read: an operator of 500 services holds some ten thousand
of them. Watches and answers to our own writes both feed it, so that a decision right after a write sees the write;
of two versions the one with the larger resourceVersion is newer (they are numbers of one counter of the server).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvferry_operator.plan.manifests.meta import INSTANCE, Object
from kvferry_operator.shell.kinds import SERVICE

ServiceKey = tuple[str, str]  # namespace, name
Ref = tuple[str, str, str]  # kind, namespace, name
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_encoder = msgspec.json.Encoder()


class _Entry(msgspec.Struct, frozen=True):
    version: int
    uid: str
    keys: tuple[ServiceKey, ...]
    content: bytes


class ObjectCache:
    """Objects by kind, namespace and name, and by the service that they concern."""

    def __init__(self) -> None:
        self._entries: dict[Ref, _Entry] = {}
        self._by_service: dict[ServiceKey, set[Ref]] = {}

    def put(self, found: Object) -> tuple[ServiceKey, ...]:
        """Take in a version; returns the services that it concerns, none if it is not newer."""
        ref = ref_of(found)
        version = version_of(found)
        before = self._entries.get(ref)
        if before is not None and version <= before.version:
            return ()
        keys = tuple(dict.fromkeys(concerns(found)))
        entry = _Entry(version, found["metadata"].get("uid", ""), keys, _encoder.encode(trimmed(found)))
        self._unlink(ref)
        self._entries[ref] = entry
        for key in keys:
            self._by_service.setdefault(key, set()).add(ref)
        return tuple(dict.fromkeys((*keys, *(before.keys if before is not None else ()))))

    def remove(self, found: Object) -> tuple[ServiceKey, ...]:
        """An object is gone (or does not carry our label any more); its last version is given."""
        ref = ref_of(found)
        entry = self._entries.get(ref)
        # A watch that is late: there is another object of this name already.
        if entry is None or (version_of(found) < entry.version and found["metadata"].get("uid") != entry.uid):
            return tuple(concerns(found))
        return self.forget(ref)

    def forget(self, ref: Ref) -> tuple[ServiceKey, ...]:
        """An object is known to be gone."""
        entry = self._entries.get(ref)
        if entry is None:
            return ()
        self._unlink(ref)
        del self._entries[ref]
        return entry.keys

    def get(self, ref: Ref) -> Object | None:
        entry = self._entries.get(ref)
        return None if entry is None else _decode(entry.content)

    def service(self, key: ServiceKey) -> Object | None:
        return self.get((SERVICE.kind, *key))

    def services(self) -> Iterator[ServiceKey]:
        return ((namespace, name) for kind, namespace, name in self._entries if kind == SERVICE.kind)

    def related(self, key: ServiceKey) -> tuple[Object, ...]:
        """Everything that concerns a service but the service itself, in a fixed order."""
        refs = sorted(self._by_service.get(key, ()))
        return tuple(_decode(self._entries[ref].content) for ref in refs if ref[0] != SERVICE.kind)

    def refs(self, kind: str, namespace: str | None) -> list[Ref]:
        """All objects of a kind, of one namespace if it is given."""
        return [ref for ref in self._entries if ref[0] == kind and namespace in (None, ref[1])]

    def uid(self, ref: Ref) -> str | None:
        entry = self._entries.get(ref)
        return None if entry is None else entry.uid

    def __len__(self) -> int:
        return len(self._entries)

    def _unlink(self, ref: Ref) -> None:
        entry = self._entries.get(ref)
        for key in () if entry is None else entry.keys:
            refs = self._by_service.get(key)
            if refs is not None:
                refs.discard(ref)
                if not refs:
                    del self._by_service[key]


def ref_of(found: Object) -> Ref:
    metadata = found["metadata"]
    return (found["kind"], metadata.get("namespace", ""), metadata["name"])


def version_of(found: Object) -> int:
    """The number of a version; 0 for an object that has none."""
    version = str(found["metadata"].get("resourceVersion", ""))
    return int(version) if version.isdigit() else 0


def concerns(found: Object) -> Iterable[ServiceKey]:
    """The services that an object has to do with: itself, the one that its label names, and its owner."""
    metadata = found["metadata"]
    namespace = metadata.get("namespace", "")
    if found["kind"] == SERVICE.kind:
        yield (namespace, metadata["name"])
        return
    if name := (metadata.get("labels") or {}).get(INSTANCE):
        yield (namespace, name)
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("kind") == SERVICE.kind and owner.get("apiVersion") == SERVICE.api_version:
            yield (namespace, owner["name"])


def trimmed(found: Object) -> Object:
    """An object without what no decision reads."""
    metadata = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    annotations: Any = metadata.get("annotations")
    if annotations and LAST_APPLIED in annotations:
        metadata["annotations"] = {name: value for name, value in annotations.items() if name != LAST_APPLIED}
    return {**found, "metadata": metadata}


def _decode(content: bytes) -> Object:
    found: Object = msgspec.json.decode(content)
    return found
