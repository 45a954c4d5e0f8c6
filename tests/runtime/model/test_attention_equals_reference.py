"""Paged attention over shuffled, poisoned blocks equals its naive twin, whatever a step mixes."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvferry_runtime.attention import native_backend, reference, torch_backend
from kvferry_runtime.attention.backend import AttentionBackend, AttentionBatch, make_backend, reasons
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.layers.kernels import choose_kernels
from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.toy_spec import ToySpec
from kvferry_wire.layout import KVGroup

CONFIG = ToySpec().model_config()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

Row = tuple[int, int]  # queries, tokens in KV after the step

DECODES: tuple[Row, ...] = ((1, 1), (1, 2), (1, 63), (1, 64), (1, 65), (1, 123))
MIXED: tuple[Row, ...] = ((1, 17), (5, 5), (1, 100), (7, 63), (2, 130), (1, 1), (64, 123))


def attend(
    backend: AttentionBackend, rows: Sequence[Row], shape: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run three layers of one step; its outputs, and the memory after it."""
    heads, kv_heads, dim = shape
    random_source = torch.Generator().manual_seed(1)
    blocks = 1 + sum(-(-context // block_size) for _, context in rows)
    group = KVGroup(name="full", layers=3, kv_heads=kv_heads, head_dim=dim, dtype=str(dtype).removeprefix("torch."))
    kv = KVMemory([group], block_size, blocks)
    kv.poison()
    free = list(range(1, blocks))
    random.Random(2).shuffle(free)
    tables = [[free.pop() for _ in range(-(-context // block_size))] for _, context in rows]
    for (queries, context), table in zip(rows, tables, strict=True):
        earlier = context - queries
        if earlier:  # what earlier steps wrote, their zero tails included
            used = torch.tensor(table[: -(-earlier // block_size)])
            values = torch.randn((len(used), 3, 2, kv_heads, block_size, dim), generator=random_source)
            values[-1, ..., (earlier - 1) % block_size + 1 :, :] = 0
            kv.tensor()[used] = values.to(dtype)
    batch = AttentionBatch.build([row[0] for row in rows], [row[1] for row in rows], tables, block_size)
    step = backend.begin(kv, batch)
    total = sum(queries for queries, _ in rows)
    outs = []
    for layer in range(3):
        qkv = torch.randn((total, heads + 2 * kv_heads, dim), generator=random_source).to(dtype)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        outs.append(step.forward(layer, q, k, v))
    return torch.stack(outs), kv.tensor()


@pytest.mark.parametrize("rows", [DECODES, MIXED, ((1, 64),), ((123, 123),), ((3, 70), (2, 9))], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 8), (9, 3, 64), (3, 3, 10), (5, 1, 6)], ids=str)
@pytest.mark.parametrize("block_size", [16, 7])
def test_torch_back_end_equals_the_twin(rows: Sequence[Row], shape: tuple[int, int, int], block_size: int) -> None:
    """Outputs and the memory written are the same; what the poison marks was never read."""
    out, memory = attend(torch_backend.make(_config(shape)), rows, shape, block_size, torch.float32)
    expected, expected_memory = attend(reference.make(_config(shape)), rows, shape, block_size, torch.float32)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[torch.float32], rtol=1e-4)
    torch.testing.assert_close(memory, expected_memory, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 8), (9, 3, 64), (5, 1, 6)], ids=str)
@pytest.mark.parametrize("block_size", [16, 7])
def test_native_back_end_equals_the_twin(rows: Sequence[Row], shape: tuple[int, int, int], block_size: int) -> None:
    """The C++ operators behind the same interface: outputs and memory, zero tails of open blocks included."""
    kernels = choose_kernels(torch.float32, env={})
    if kernels.library is None:
        pytest.skip(kernels.reason)
    out, memory = attend(native_backend.make(_config(shape), kernels), rows, shape, block_size, torch.float32)
    expected, expected_memory = attend(reference.make(_config(shape)), rows, shape, block_size, torch.float32)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[torch.float32], rtol=1e-4)
    torch.testing.assert_close(memory, expected_memory, atol=0, rtol=0, equal_nan=True)


def test_bfloat16_equals_the_twin_within_its_precision() -> None:
    """The same code serves bfloat16 caches."""
    shape = (6, 2, 32)
    out, _ = attend(torch_backend.make(_config(shape)), MIXED, shape, 16, torch.bfloat16)
    expected, _ = attend(reference.make(_config(shape)), MIXED, shape, 16, torch.bfloat16)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[torch.bfloat16], rtol=2e-2)


def test_groups_hold_rows_of_like_length() -> None:
    """One long row does not pad fifty short ones, and every row is in exactly one group."""
    contexts = [2000] + [20 + index % 30 for index in range(50)]
    geometry = torch_backend._Geometry(layers=1, kv_heads=2, slots=16, dim=8, dtype=torch.float32)
    groups = torch_backend._group_rows(list(range(51)), contexts, geometry)
    assert sorted(row for group in groups for row in group) == list(range(51))
    for group in groups:
        blocks = [-(-contexts[row] // 16) for row in group]
        assert sum(blocks) >= 0.75 * max(blocks) * len(blocks)
    assert len(groups) <= 4


def test_groups_stay_under_their_bytes() -> None:
    """Many equal long rows are split so that the work buffer stays small."""
    geometry = torch_backend._Geometry(layers=1, kv_heads=8, slots=16, dim=128, dtype=torch.float32)
    groups = torch_backend._group_rows(list(range(64)), [2048] * 64, geometry)
    assert all(len(group) * 128 * geometry.block_bytes <= torch_backend._GROUP_BYTES for group in groups)


def test_a_back_end_that_cannot_serve_says_why() -> None:
    """Integers are no attention; the reason is in the table and in the error."""
    without = {"native": "torch's operators were asked for", "torch": "ok", "reference": "ok"}
    assert reasons(CONFIG, torch.device("cpu"), torch.float32) == without
    assert "not bfloat16" in reasons(CONFIG, torch.device("cpu"), torch.bfloat16)["native"]
    assert "int64" in reasons(CONFIG, torch.device("cpu"), torch.int64)["torch"]
    with pytest.raises(ValueError, match="floating point"):
        make_backend(CONFIG, torch.device("cpu"), torch.int64)
    with pytest.raises(ValueError, match="accepted: auto, native, torch, reference"):
        make_backend(CONFIG, torch.device("cpu"), torch.float32, "cuda")


@pytest.mark.parametrize(
    ("queries", "contexts", "tables", "said"),
    [
        ([0], [4], [[1]], "0 queries"),
        ([5], [4], [[1]], "5 queries"),
        ([1], [9], [[1, 2]], "2 blocks for 9 tokens"),
        ([1], [4], [[0]], "block 0"),
        ([1, 1], [4], [[1]], "one entry per row"),
        ([], [], [], "at least one row"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(
    queries: list[int], contexts: list[int], tables: list[list[int]], said: str
) -> None:
    """Lengths and tables are checked where a batch is made."""
    with pytest.raises(ValueError, match=said):
        AttentionBatch.build(queries, contexts, tables, 4)


def test_a_batch_names_slots_and_open_blocks() -> None:
    """Slots follow the table; a block is open when this step begins it and does not fill it."""
    batch = AttentionBatch.build([6, 1, 1, 4], [6, 4, 5, 8], [[9, 2, 3], [5], [6, 7], [4, 8]], 4)
    assert batch.slots.tolist() == [36, 37, 38, 39, 8, 9, 23, 28, 32, 33, 34, 35]
    assert batch.open_blocks.tolist() == [2, 7]
    assert batch.block_tables.tolist() == [[9, 2], [5, 0], [6, 7], [4, 8]]
    assert batch.query_starts.tolist() == [0, 6, 7, 8, 12]


def _config(shape: tuple[int, int, int]) -> ModelConfig:
    spec = ToySpec(heads=shape[0], dim=shape[2])
    return spec.model_config()
