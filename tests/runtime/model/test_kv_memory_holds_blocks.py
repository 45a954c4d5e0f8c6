"""KV memory hands out whole blocks as bytes, in the order of the wire, and nothing beyond them."""

import pytest
import torch

from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_wire.layout import KVGroup

GROUPS = (
    KVGroup(name="full", layers=3, kv_heads=2, head_dim=5, dtype="float32"),
    KVGroup(name="half", layers=1, kv_heads=1, head_dim=6, dtype="bfloat16"),
)


def make_memory() -> KVMemory:
    return KVMemory(GROUPS, 4, 6)


def test_a_block_is_its_layouts_bytes() -> None:
    """As long as the layout says, contiguous, writable, and the very memory that attention reads."""
    memory = make_memory()
    assert memory.nbytes == 6 * sum(group.block_bytes(4) for group in GROUPS)
    for index, group in enumerate(GROUPS):
        block = memory.block(index, 5)
        assert (block.nbytes, block.contiguous, block.readonly, block.itemsize) == (
            group.block_bytes(4),
            True,
            False,
            1,
        )
        block[:] = bytes(range(1, 5)) * (block.nbytes // 4)
        assert bytes(memory.tensor(index)[5].contiguous().view(torch.uint8).flatten().tolist()) == bytes(block)
        assert not memory.tensor(index)[:5].any()


def test_the_order_is_layer_side_head_slot_dim() -> None:
    """One value lands where the layout says."""
    memory = make_memory()
    memory.tensor()[2, 1, 1, 0, 3, 4] = 1.0
    at = (((1 * 2 + 1) * 2 + 0) * 4 + 3) * 5 + 4
    assert list(memory.block(0, 2).cast("f")).index(1.0) == at
    assert memory.layout().groups == GROUPS
    assert memory.layout().block_size == 4


@pytest.mark.parametrize(("group", "block"), [(0, 0), (0, 6), (0, -1), (2, 1), (-1, 1)])
def test_what_is_no_block_is_refused(group: int, block: int) -> None:
    """Negative ids do not count from the end, and the null block is nobody's."""
    with pytest.raises(ValueError, match="given"):
        make_memory().block(group, block)


def test_blocks_are_copied_in_all_groups() -> None:
    """Sources are read before targets are written, so a swap is a swap."""
    memory = make_memory()
    for index in range(2):
        memory.tensor(index)[1], memory.tensor(index)[2] = 1, 2
    memory.copy_blocks([(1, 2), (2, 1), (1, 4)])
    for index in range(2):
        assert [float(memory.tensor(index)[block].float().mean()) for block in (1, 2, 3, 4)] == [2, 1, 0, 1]
    memory.copy_blocks([])
    with pytest.raises(ValueError, match="copy of block 1 to 0"):
        memory.copy_blocks([(1, 0)])


def test_poison_spares_the_null_block() -> None:
    """What padding reads stays zero."""
    memory = make_memory()
    memory.poison()
    assert not memory.tensor()[0].any()
    assert memory.tensor()[1:].isnan().all()
    memory.clear_blocks(torch.tensor([3]))
    assert not memory.tensor(1)[3].any()


@pytest.mark.parametrize(("block_size", "blocks"), [(0, 4), (4, 1)])
def test_sizes_that_hold_nothing_are_refused(block_size: int, blocks: int) -> None:
    """At least one slot a block, and one block besides the null block."""
    with pytest.raises(ValueError, match="accepted"):
        KVMemory(GROUPS, block_size, blocks)
