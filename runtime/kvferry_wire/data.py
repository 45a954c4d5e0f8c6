"""The tcp data plane (port 5601): a mutual HMAC challenge, then reads that each name their lease.

Both sides send a 32-byte nonce at once; each answers with ``proof(kv key, its side, own nonce, peer's nonce)``. A peer
that has not proved the key within ``Limits.challenge_s`` is closed. Then the reader sends ``ReadRequest`` frames
(u32 little-endian length + msgpack) and gets a ``ReadReply`` frame each, followed by ``nbytes`` raw bytes: the blocks
in the lease's own order, each as it lies in memory (see ``layout``). Behind its last request it may send its
``Release`` here as well, which saves a round trip: requests of one connection are taken one after another, each when
the bytes for those before have been copied. So all of a pull goes over one connection; a repeat of the release goes
over the control port, when all bytes have arrived.
"""

from typing import Literal

import msgspec

from kvferry_wire.control import LeaseRef
from kvferry_wire.keys import mac

NONCE_BYTES = 32
PROOF_BYTES = 32


class ReadRequest(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Blocks ``first .. first+count`` of a group of a lease."""

    incarnation: bytes
    epoch: int
    lease_id: int
    prompt_digest: bytes
    group: int
    first: int
    count: int


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """``control.Release``, sent on this connection: `reader` and `id` are those of a ``ControlRequest``.

    Answered by a ``ReadReply`` without bytes, whose ``ok`` stands for ``held``.
    """

    reader: bytes
    id: int
    lease: LeaseRef


DataRequest = ReadRequest | ReleaseRequest


class ReadReply(msgspec.Struct, frozen=True, array_like=True):
    status: Literal["ok", "expired", "unknown", "invalid"]
    nbytes: int


def proof(kv_key: bytes, side: Literal["reader", "owner"], own_nonce: bytes, peer_nonce: bytes) -> bytes:
    """What a side sends to prove that it holds the ``kv`` key; bound to both nonces and to the side."""
    return mac(kv_key, f"data-{side}", own_nonce + peer_nonce)


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(DataRequest).decode
decode_reply = msgspec.msgpack.Decoder(ReadReply).decode
