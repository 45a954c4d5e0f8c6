"""The state stream (port 5557): KV events and load, numbered, and the snapshot that a joining router starts from.

ZMQ PUB under CURVE, one frame per message: a ``StateMessage``. Sequence numbers count by one from 1 within an
incarnation. Join: subscribe, buffer, fetch ``GET /internal/v1/state`` (a ``Snapshot``), apply the messages whose
sequence is greater; a gap or another incarnation joins again. Token ids never leave the pod.
"""

import msgspec


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """Blocks now in the prefix cache; ``parent`` is the hash before the first of them, each is parent of the next."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tier: str = "device"


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    hashes: tuple[bytes, ...]


class Cleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared"):
    """The whole prefix cache was unpublished."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Sent on change, and at least each ``Limits.load_interval_s``."""

    running: int  # sequences in the running batch
    waiting: int  # requests waiting, those that wait for remote KV included
    queued_tokens: int  # input tokens of waiting requests not computed yet
    free_blocks: int  # free or cached without a reference
    total_blocks: int
    leases: int
    draining: bool


StateEvent = BlocksStored | BlocksRemoved | Cleared | Load


class StateMessage(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: bytes
    sequence: int
    event: StateEvent


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that the stream said up to and including ``sequence``."""

    incarnation: bytes
    sequence: int
    hashes: tuple[bytes, ...]
    load: Load


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(StateMessage).decode
decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode
