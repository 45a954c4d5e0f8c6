"""A list of EndpointSlices and the events of a watch, as the API server writes them. Pure."""

from typing import NamedTuple

import msgspec

from kvferry_router.discovery.slices import EndpointSlice

_GONE = 410


class UnreadableError(ValueError):
    """Not what the API says that it would be."""


class SliceList(NamedTuple):
    """All slices at one version."""

    version: str
    slices: tuple[EndpointSlice, ...]


class Changed(NamedTuple):
    """A slice was added or modified."""

    version: str
    slice: EndpointSlice


class Deleted(NamedTuple):
    """A slice was deleted, or is not of the Services asked for any more."""

    version: str
    name: str


class Bookmark(NamedTuple):
    """Nothing has happened up to this version."""

    version: str


class Expired(NamedTuple):
    """The version to watch from is too old."""

    told: str


class Broken(NamedTuple):
    """The API server ends the watch for a reason of its own."""

    told: str
    retry_after_s: float


Event = Changed | Deleted | Bookmark | Expired | Broken


class _Meta(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _List(msgspec.Struct):
    metadata: _Meta
    items: tuple[EndpointSlice, ...] | None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bare(msgspec.Struct):
    metadata: _Meta


class _Details(msgspec.Struct, rename="camel"):
    retry_after_seconds: int | None = None


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""
    details: _Details | None = None


_decode_list = msgspec.json.Decoder(_List).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_slice = msgspec.json.Decoder(EndpointSlice).decode
_decode_bare = msgspec.json.Decoder(_Bare).decode
_decode_status = msgspec.json.Decoder(_Status).decode


def read_list(body: bytes) -> SliceList:
    """Raises ``UnreadableError``."""
    try:
        found = _decode_list(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableError(f"a list of EndpointSlices: {error}") from None
    if not found.metadata.resource_version:
        raise UnreadableError("a list of EndpointSlices: it has no version")
    return SliceList(found.metadata.resource_version, found.items or ())


def read_event(line: bytes) -> Event:
    """Raises ``UnreadableError``."""
    try:
        event = _decode_event(line)
        match event.type:
            case "ADDED" | "MODIFIED":
                changed = _decode_slice(event.object)
                return Changed(changed.metadata.resource_version, changed)
            case "DELETED":
                gone = _decode_slice(event.object)
                return Deleted(gone.metadata.resource_version, gone.metadata.name)
            case "BOOKMARK":
                return Bookmark(_decode_bare(event.object).metadata.resource_version)
            case "ERROR":
                return _ending(_decode_status(event.object))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableError(f"an event of a watch: {error}") from None
    raise UnreadableError(f"an event of a watch: {event.type[:40]!r} is no type of event")


def _ending(status: _Status) -> Expired | Broken:
    told = f"the watch ended with {status.code}: {status.message}"
    if status.code == _GONE:
        return Expired(told)
    after = None if status.details is None else status.details.retry_after_seconds
    return Broken(told, float(after or 0))
