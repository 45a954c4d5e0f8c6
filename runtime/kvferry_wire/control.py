"""KV control (port 5600): handshake, renewal, release and failure of leases. ZMQ DEALER -> ROUTER under CURVE.

A request is one ZMQ frame holding a ``ControlRequest``; its reply is one frame holding a ``ControlReply`` with the
same id. ``Hello`` is decoded in two phases: version and compat hash first, the body only if both are equal, so that a
mismatch is a refusal that names the field and never a decode error. Of two hashes that differ, the fields are compared.
"""

from typing import Literal

import msgspec

from kvferry_wire.hashing import CompatFields
from kvferry_wire.layout import LayoutDescriptor

LeaseAnswer = Literal["held", "expired", "unknown"]


class LeaseRef(msgspec.Struct, frozen=True, array_like=True):
    """A lease as its reader knows it: all four must agree for ``held``."""

    lease_id: int
    incarnation: bytes
    epoch: int
    prompt_digest: bytes


class HelloBody(msgspec.Struct, frozen=True, kw_only=True):
    """The second phase: who speaks and how its KV lies."""

    incarnation: bytes
    epoch: int
    layout: LayoutDescriptor
    backends: dict[str, bytes]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First phase, with the second still encoded in ``body``."""

    protocol_version: int
    compat_hash: str
    compat: bytes = b""  # msgpack of CompatFields, decoded only where the versions are equal and the hashes are not
    body: bytes  # msgpack of HelloBody


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    leases: tuple[LeaseRef, ...]


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Sent only after the reader's last byte."""

    lease: LeaseRef


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The reader gives the lease up without having read it."""

    lease: LeaseRef
    reason: str


ControlBody = Hello | Renew | Release | Failed


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    reader: bytes  # the reader's incarnation
    id: int  # a counter of the reader's incarnation; a repeat carries the same id
    body: ControlBody


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    body: bytes  # msgpack of HelloBody


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """The peers do not fit; ``field`` says where. Final until one of them restarts."""

    field: str
    ours: str
    theirs: str


class Answers(msgspec.Struct, frozen=True, kw_only=True, tag="answers"):
    """One answer per lease of the request, in its order."""

    answers: tuple[LeaseAnswer, ...]


class ControlReply(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    body: Welcome | Refuse | Answers


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ControlRequest).decode
decode_reply = msgspec.msgpack.Decoder(ControlReply).decode
decode_compat = msgspec.msgpack.Decoder(CompatFields).decode
decode_hello_body = msgspec.msgpack.Decoder(HelloBody).decode
