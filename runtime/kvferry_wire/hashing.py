"""Block hashes, the prompt digest and the compat hash: the same bytes in every process.

A block hash names the content of one full KV block: keyed BLAKE2b (16 bytes) chained over the parent block's hash,
the block's token ids and the key extras. The key is the service's ``hash`` key, so a hash cannot be computed, and a
collision cannot be searched for, outside the service.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from kvferry_wire.canonical import KeyExtras, field, token_bytes

BLOCK_HASH_BYTES = 16
DIGEST_BYTES = 32

_ROOT = bytes(BLOCK_HASH_BYTES)


def block_hash(key: bytes, parent: bytes | None, token_ids: Sequence[int], extras: bytes) -> bytes:
    """Hash one full block.

    Args:
        key: the service's ``hash`` key, at most 64 bytes.
        parent: the hash of the block before it; ``None`` for a sequence's first block.
        token_ids: the block's token ids, as many as the block has slots.
        extras: ``KeyExtras.canonical()``.
    """
    state = hashlib.blake2b(digest_size=BLOCK_HASH_BYTES, key=key, person=b"kvferry-block")
    state.update(_ROOT if parent is None else parent)
    state.update(field(0, token_bytes(token_ids)))
    state.update(extras)
    return state.digest()


def chain_hashes(key: bytes, token_ids: Sequence[int], block_size: int, extras: KeyExtras) -> list[bytes]:
    """Hash each full block of a sequence, first to last; a partial last block has no hash."""
    encoded = extras.canonical()
    hashes: list[bytes] = []
    parent: bytes | None = None
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(key, parent, token_ids[start : start + block_size], encoded)
        hashes.append(parent)
    return hashes


def prompt_digest(key: bytes, token_ids: Sequence[int], extras: KeyExtras) -> bytes:
    """Digest of all tokens of a handle and whose they are; ``key`` is the service's ``kv`` key."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"kvferry-prompt")
    state.update(field(0, token_bytes(token_ids)))
    state.update(extras.canonical())
    return state.digest()


class CompatFields(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for one engine to compute on another's KV."""

    protocol_version: int
    model_digest: str  # over config, tokenizer and weights index
    dtype: str
    kv_dtype: str
    kv_groups: tuple[str, ...]  # `KVGroup.describe()` of each
    hash_key_id: str  # `ServiceKeys.hash_key_id()`: a name of the key, not the key

    def compat_hash(self) -> str:
        """SHA-256 over the fields, as hex."""
        parts = [
            field(1, str(self.protocol_version).encode()),
            field(2, self.model_digest.encode()),
            field(3, self.dtype.encode()),
            field(4, self.kv_dtype.encode()),
            field(5, b"".join(field(0, group.encode()) for group in self.kv_groups)),
            field(6, self.hash_key_id.encode()),
        ]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def first_difference(self, other: "CompatFields") -> tuple[str, str, str] | None:
        """The first differing field as (name, ours, theirs), or ``None`` when all are equal."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return name, _shown(ours), _shown(theirs)
        return None


def _shown(value: object) -> str:
    return "; ".join(value) if isinstance(value, tuple) else str(value)
