"""Paged attention, rotation and writing equal their references over shuffled, poisoned blocks."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvferry_kernels.native.library import NativeLibrary
from kvferry_kernels.paged import PagedBatch
from kvferry_kernels.paged_attention import native, reference
from kvferry_kernels.rope_write import native as rope_native
from kvferry_kernels.rope_write import reference as rope_reference

Row = tuple[int, int]  # queries, tokens in the cache after the step
Shape = tuple[int, int, int]  # heads, KV heads, dim

DECODES: tuple[Row, ...] = ((1, 1), (1, 2), (1, 16), (1, 63), (1, 64), (1, 65), (1, 123), (1, 300))
MIXED: tuple[Row, ...] = ((1, 17), (5, 5), (1, 100), (7, 63), (2, 130), (1, 1), (64, 123))
SHAPES: tuple[Shape, ...] = (
    (4, 2, 8),
    (9, 3, 64),
    (3, 3, 10),
    (5, 1, 6),
    (8, 1, 16),
    (7, 1, 80),
    (6, 2, 36),
    (2, 2, 128),
    (4, 1, 256),
    (1, 1, 2),
)


def make_step(rows: Sequence[Row], shape: Shape, block_size: int, layers: int = 2) -> tuple[Tensor, PagedBatch]:
    """A cache whose earlier positions are filled, all else NaN, and the step's rows on scattered blocks."""
    _, kv_heads, dim = shape
    source = torch.Generator().manual_seed(1)
    blocks = 2 + sum(-(-context // block_size) for _, context in rows)
    memory = torch.full((blocks, layers, 2, kv_heads, block_size, dim), float("nan"))
    free = list(range(1, blocks))
    random.Random(2).shuffle(free)
    width = max((-(-context // block_size) for _, context in rows), default=1) + 2
    tables = torch.full((len(rows), width), 0)
    starts, slots = [0], []
    for index, (queries, context) in enumerate(rows):
        needed = -(-context // block_size)
        tables[index, :needed] = torch.tensor([free.pop() for _ in range(needed)])
        positions = torch.arange(context)
        at, offsets = tables[index, positions // block_size], positions % block_size
        for side in (0, 1):
            earlier = torch.randn((context - queries, layers, kv_heads, dim), generator=source)
            memory[at[: context - queries], :, side, :, offsets[: context - queries]] = earlier
        slots.append(at[context - queries :] * block_size + offsets[context - queries :])
        starts.append(starts[-1] + queries)
    return memory, PagedBatch(
        torch.tensor(starts),
        torch.tensor([context for _, context in rows], dtype=torch.int64),
        tables,
        torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64),
    )


def make_qkv(batch: PagedBatch, shape: Shape, seed: int = 3) -> Tensor:
    heads, kv_heads, dim = shape
    size = (batch.slots.shape[0], heads + 2 * kv_heads, dim)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [DECODES, MIXED, ((1, 64),), ((123, 123),), ((3, 70), (2, 9))], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 7, 1, 96])
def test_attention_of_mixed_rows(library: NativeLibrary, rows: Sequence[Row], shape: Shape, block_size: int) -> None:
    """Decodes, chunks and whole prompts, group sizes of 1 to 8, odd head sizes; what is NaN is never read."""
    heads, kv_heads, _ = shape
    memory, batch = make_step(rows, shape, block_size)
    qkv = make_qkv(batch, shape)
    for layer in (0, 1):
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        rope_native.write(library, k, v, memory=memory, layer=layer, batch=batch)
        got = native.paged_attention(library, q, memory, layer, batch)
        expected = reference.paged_attention(q, memory, layer, batch)
        assert expected.isfinite().all()
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_a_long_context(library: NativeLibrary, threads: int) -> None:
    """Thousands of positions: the sums stay as exact as float32 allows."""
    shape = (6, 2, 64)
    memory, batch = make_step(((1, 5000), (3, 2049)), shape, 16)
    q, k, v = make_qkv(batch, shape).split([6, 2, 2], 1)
    rope_native.write(library, k, v, memory=memory, layer=1, batch=batch)
    got = native.paged_attention(library, q, memory, 1, batch)
    torch.testing.assert_close(got, reference.paged_attention(q, memory, 1, batch), atol=2e-6, rtol=1e-4)


def test_sharp_attention(library: NativeLibrary) -> None:
    """Scores of hundreds, where e^x of all but one position vanishes, and of minus hundreds."""
    shape = (2, 1, 8)
    memory, batch = make_step(((1, 200),), shape, 16)
    q, k, v = make_qkv(batch, shape).split([2, 1, 1], 1)
    rope_native.write(library, k, v, memory=memory, layer=0, batch=batch)
    for factor in (300.0, -300.0, 1e-3):
        got = native.paged_attention(library, q * factor, memory, 0, batch)
        expected = reference.paged_attention(q * factor, memory, 0, batch)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("shape", [(9, 3, 64), (5, 1, 6)], ids=str)
def test_a_query_is_the_same_bits_in_any_step(library: NativeLibrary, threads: int, shape: Shape) -> None:
    """A prompt at once, in chunks, and token by token, beside others and alone."""
    heads, kv_heads, _ = shape
    length = 150
    whole_memory, whole = make_step(((length, length), (7, 40)), shape, 16)
    qkv = make_qkv(whole, shape)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    rope_native.write(library, k, v, memory=whole_memory, layer=0, batch=whole)
    expected = native.paged_attention(library, q, whole_memory, 0, whole)
    for chunk in (1, 5, 64):
        for first in range(0, length, chunk):
            last = min(first + chunk, length)
            part = PagedBatch(
                torch.tensor([0, last - first]), torch.tensor([last]), whole.tables[:1], whole.slots[first:last]
            )
            got = native.paged_attention(library, q[first:last], whole_memory, 0, part)
            assert torch.equal(got, expected[first:last])


def test_a_damaged_slot_stays_visible(library: NativeLibrary) -> None:
    """NaN within a row's own context is not attended away; it does not reach another row."""
    shape = (2, 2, 8)
    memory, batch = make_step(((1, 20), (1, 20)), shape, 16)
    q, k, v = make_qkv(batch, shape).split([2, 2, 2], 1)
    rope_native.write(library, k, v, memory=memory, layer=0, batch=batch)
    memory[batch.tables[0, 0], 0, 0, :, 3, 1] = float("nan")
    got = native.paged_attention(library, q, memory, 0, batch)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 7])
def test_rotation_and_writing(library: NativeLibrary, threads: int, shape: Shape, block_size: int) -> None:
    """Queries and keys are turned, keys and values lie in their slots, and no other float of the cache has changed."""
    heads, _, dim = shape
    memory, batch = make_step(MIXED, shape, block_size)
    angles = torch.outer(torch.arange(batch.slots.shape[0]).float(), torch.rand(dim // 2))
    phases = torch.stack((angles.cos(), angles.sin()), -1).contiguous()
    qkv, expected_qkv, expected = make_qkv(batch, shape), make_qkv(batch, shape), memory.clone()
    rope_native.rope_write(library, qkv, heads, phases, memory=memory, layer=1, batch=batch)
    rope_reference.rope_write(expected_qkv, heads, phases, memory=expected, layer=1, slots=batch.slots)
    torch.testing.assert_close(qkv, expected_qkv, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(memory, expected, atol=1e-6, rtol=1e-5, equal_nan=True)
    assert torch.equal(memory[:, 0].isnan(), expected[:, 0].isnan())


def test_an_empty_step(library: NativeLibrary, threads: int) -> None:
    """No row, no token, nothing written."""
    memory = torch.zeros((2, 1, 2, 1, 4, 8))
    none = torch.empty(0, dtype=torch.int64)
    batch = PagedBatch(torch.zeros(1, dtype=torch.int64), none, torch.empty((0, 1), dtype=torch.int64), none)
    assert native.paged_attention(library, torch.empty((0, 2, 8)), memory, 0, batch).shape == (0, 2, 8)
    rope_native.write(library, torch.empty((0, 1, 8)), torch.empty((0, 1, 8)), memory=memory, layer=0, batch=batch)
    assert not memory.any()


def test_numbers_outside_of_the_cache_are_refused(library: NativeLibrary) -> None:
    """A block, slot, length or layer that does not exist is an error, and nothing is read or written."""
    shape = (2, 1, 8)
    memory, good = make_step(((1, 20), (2, 9)), shape, 4)
    before = memory.clone()
    q, k, v = make_qkv(good, shape).split([2, 1, 1], 1)
    blocks = memory.shape[0]
    bad = [
        good._replace(tables=torch.full_like(good.tables, blocks)),
        good._replace(tables=torch.full_like(good.tables, -1)),
        good._replace(contexts=torch.tensor([10**9, 9])),
        good._replace(contexts=torch.tensor([20, 1])),
        good._replace(slots=torch.full_like(good.slots, blocks * 4)),
        good._replace(slots=torch.full_like(good.slots, -1)),
        good._replace(starts=torch.tensor([0, 1, 4])),
        good._replace(starts=torch.tensor([1, 2, 3])),
    ]
    for batch in bad:
        with pytest.raises(ValueError, match="outside of the cache"):
            native.paged_attention(library, q, memory, 0, batch)
        with pytest.raises(ValueError, match="outside of the cache"):
            rope_native.write(library, k, v, memory=memory, layer=0, batch=batch)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match="outside of the cache"):
            native.paged_attention(library, q, memory, layer, good)
    torch.testing.assert_close(memory, before, atol=0, rtol=0, equal_nan=True)


def test_shapes_that_are_not_supported_have_a_reason(library: NativeLibrary) -> None:
    """Before anything is computed, in words."""
    assert "at most 256" in native.unsupported(library, 1, 1, 258)
    assert "5 heads over 2 KV heads" in native.unsupported(library, 5, 2, 8)
    assert native.unsupported(library, 9, 3, 64) == ""
