"""Canonical bytes: one unambiguous encoding of what is hashed.

A field is ``tag (1 byte) | length (u32 little-endian) | content``, so no value can be mistaken for a neighbour
(a salt never equals an adapter's name). Token ids are little-endian u32.
"""

import struct
import sys
from array import array
from collections.abc import Sequence

import msgspec

_LENGTH = struct.Struct("<I")


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as little-endian u32. Raises ``OverflowError`` for an id outside 0..2**32-1."""
    encoded = array("I", token_ids)
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()


def field(tag: int, content: bytes) -> bytes:
    """Encode one tagged, length-prefixed field."""
    return bytes((tag,)) + _LENGTH.pack(len(content)) + content


class KeyExtras(msgspec.Struct, frozen=True):
    """What besides the tokens decides what a KV block holds, or who may read it."""

    tenant_salt: bytes = b""
    adapter: str = ""
    adapter_generation: int = 0
    media: tuple[bytes, ...] = ()  # digests of the media in the prompt, in order

    def canonical(self) -> bytes:
        """The extras as tagged fields, in one fixed order."""
        parts = [
            field(1, self.tenant_salt),
            field(2, self.adapter.encode()),
            field(3, self.adapter_generation.to_bytes(8, "little")),
        ]
        parts += [field(4, digest) for digest in self.media]
        return b"".join(parts)
