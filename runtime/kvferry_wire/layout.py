"""How KV lies in memory and on the wire.

A KV group is one allocation ``[block, layer, K|V, head, slot, dim]``, so a block of a group is one contiguous run of
``block_bytes``. On the wire a block has this order, little-endian, unpadded, its unused slots zero. Block 0 is the null
block: no sequence owns it.
"""

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one KV group on one engine (one tensor-parallel rank)."""

    name: str  # "full" for full attention
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    def describe(self) -> str:
        """What must be equal for two engines' KV of this group to mean the same."""
        return f"{self.name}/layers={self.layers}/kv_heads={self.kv_heads}/head_dim={self.head_dim}/{self.dtype}"

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of ``block_size`` slots."""
        return self.layers * 2 * self.kv_heads * block_size * self.head_dim * DTYPE_BYTES[self.dtype]


class LayoutDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """What ``Hello`` compares; a difference for which no conversion exists is refused by the field's name."""

    block_size: int
    tensor_parallel: int
    order: str  # "block,layer,kv,head,slot,dim"
    groups: tuple[KVGroup, ...]

    def first_difference(self, other: "LayoutDescriptor") -> tuple[str, str, str] | None:
        """The first differing field as (name, ours, theirs), or ``None`` when all are equal."""
        for name in ("block_size", "tensor_parallel", "order"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return name, str(ours), str(theirs)
        ours_groups = [group.describe() for group in self.groups]
        theirs_groups = [group.describe() for group in other.groups]
        if ours_groups != theirs_groups:
            return "groups", "; ".join(ours_groups), "; ".join(theirs_groups)
        return None


BLOCK_ORDER = "block,layer,kv,head,slot,dim"
