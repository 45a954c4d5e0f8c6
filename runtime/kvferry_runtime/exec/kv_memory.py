"""KV memory: one zeroed tensor per KV group, in the block order of ``kvferry_wire.layout``.

Invariants that the attention back ends and the wire rely on:

- Block 0, the null block, is never written and stays zero. Padding of block tables points to it.
- Slots of an owned block behind its last written one are zero: a block is cleared when its first slot is written and
  the same step does not fill it (``AttentionBatch.open_blocks``). So what is read as padding is finite, and no block
  leaves the process with another sequence's values in its tail.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry_wire.layout import BLOCK_ORDER, KVGroup, LayoutDescriptor

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
}

_INT_POISON = -0x21524110


class KVMemory:
    """The KV blocks of one engine on one device.

    Args:
        groups: the model's ``kv_groups()``.
        block_size: slots (tokens) of a block.
        blocks: how many blocks, the null block included; at least 2.
    """

    def __init__(
        self, groups: Sequence[KVGroup], block_size: int, blocks: int, *, device: torch.device | str = "cpu"
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} given; at least 1 is accepted")
        if blocks < 2:
            raise ValueError(f"blocks: {blocks} given; at least 2 are accepted (block 0 is the null block)")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks = blocks
        self._tensors = [
            torch.zeros(
                (blocks, group.layers, 2, group.kv_heads, block_size, group.head_dim),
                dtype=TORCH_DTYPES[group.dtype],
                device=device,
            )
            for group in self.groups
        ]
        # A block as bytes is a row of this view, which shares the tensor's storage.
        self._bytes = [
            t.view(blocks, -1).view(torch.uint8).numpy() if t.device.type == "cpu" else None for t in self._tensors
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all groups together."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def tensor(self, group: int = 0) -> Tensor:
        """A group's memory: [blocks, layers, K|V, kv_heads, block_size, head_dim]."""
        return self._tensors[group]

    def block(self, group: int, block_id: int) -> memoryview:
        """The bytes of one block, in wire order: writable, contiguous, no copy.

        Raises:
            ValueError: no such group or block; the null block belongs to no one and is refused too.
        """
        if not 0 <= group < len(self.groups):
            raise ValueError(f"group: {group} given; 0..{len(self.groups) - 1} are accepted")
        if not 1 <= block_id < self.blocks:
            raise ValueError(f"block: {block_id} given; 1..{self.blocks - 1} are accepted")
        rows = self._bytes[group]
        if rows is None:
            raise ValueError("block: KV memory of this device has no bytes in this process")
        return memoryview(rows[block_id])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to) each, in all groups. Sources are read before any target is written."""
        if not pairs:
            return
        for source, target in pairs:
            if not (1 <= source < self.blocks and 1 <= target < self.blocks):
                raise ValueError(f"copy of block {source} to {target}: 1..{self.blocks - 1} are accepted")
        sources = torch.tensor([pair[0] for pair in pairs])
        targets = torch.tensor([pair[1] for pair in pairs])
        for tensor in self._tensors:
            tensor[targets] = tensor[sources]

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Zero whole blocks (int64 [n]) in all groups."""
        for tensor in self._tensors:
            tensor.index_fill_(0, block_ids, 0)

    def poison(self, block_ids: Sequence[int] | None = None) -> None:
        """For tests: fill blocks (default all but the null block) with NaN, or a fixed pattern where integers lie."""
        rows = torch.arange(1, self.blocks) if block_ids is None else torch.tensor(list(block_ids))
        for tensor in self._tensors:
            tensor.index_fill_(0, rows, float("nan") if tensor.is_floating_point() else _INT_POISON)

    def layout(self) -> LayoutDescriptor:
        """What a peer must equal to take these blocks as they lie."""
        return LayoutDescriptor(block_size=self.block_size, tensor_parallel=1, order=BLOCK_ORDER, groups=self.groups)
