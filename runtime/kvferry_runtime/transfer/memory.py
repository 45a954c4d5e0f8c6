"""KV memory as the transfer sees it: blocks of bytes. `exec.kv_memory.KVMemory` is the real one."""

from collections.abc import Sequence
from typing import Protocol

from kvferry_wire.layout import BLOCK_ORDER, KVGroup, LayoutDescriptor


class BlockMemory(Protocol):
    """Blocks by KV group and id."""

    def block(self, group: int, block_id: int) -> memoryview:
        """The bytes of one block in wire order: writable, contiguous, `KVGroup.block_bytes` long, no copy."""
        ...


class ToyBlockMemory:
    """Blocks in plain byte arrays, for tests, simulation and benchmarks without torch.

    Args:
        groups: shapes of the KV groups.
        block_size: slots of a block.
        blocks: per group, the null block included.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int, blocks: int) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks = blocks
        self._bytes = [group.block_bytes(block_size) for group in self.groups]
        self._memory = [memoryview(bytearray(blocks * nbytes)) for nbytes in self._bytes]

    def block(self, group: int, block_id: int) -> memoryview:
        """See `BlockMemory`. Raises `ValueError` for the null block and for what does not exist."""
        if not 0 <= group < len(self.groups) or not 1 <= block_id < self.blocks:
            raise ValueError(f"block: group {group}, id {block_id}; ids 1..{self.blocks - 1} are accepted")
        nbytes = self._bytes[group]
        return self._memory[group][block_id * nbytes : (block_id + 1) * nbytes]

    def layout(self) -> LayoutDescriptor:
        """What a peer must equal to take these blocks as they lie."""
        return LayoutDescriptor(block_size=self.block_size, tensor_parallel=1, order=BLOCK_ORDER, groups=self.groups)
