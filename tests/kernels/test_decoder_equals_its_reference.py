"""A decoder in one call equals the operators' references in turn, and a token's bits do not depend on its batch."""

import random

import pytest
import torch
from torch import Tensor

from kvferry_kernels.decoder.native import NativeDecoder
from kvferry_kernels.decoder.reference import decoder_forward
from kvferry_kernels.decoder.shape import DecoderShape, LayerWeights
from kvferry_kernels.linear.reference import linear
from kvferry_kernels.native.library import NativeLibrary
from kvferry_kernels.paged import PagedBatch
from kvferry_kernels.rms_norm import native as norm_native
from kvferry_kernels.rms_norm.reference import rms_norm
from tests.kernels.test_attention_equals_its_reference import MIXED, make_step

SHAPES = [
    DecoderShape(vocab=263, hidden=42, heads=6, kv_heads=3, dim=10, inner=52, layers=2, eps=1e-5),
    DecoderShape(vocab=100, hidden=96, heads=9, kv_heads=3, dim=64, inner=131, layers=2, eps=1e-6),
    DecoderShape(vocab=33, hidden=17, heads=4, kv_heads=1, dim=6, inner=33, layers=2, eps=1e-5),
]


def make_weights(shape: DecoderShape) -> tuple[Tensor, list[LayerWeights], Tensor]:
    """Embedding, layers and output layer."""
    source = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), generator=source) / columns**0.5

    def scale() -> Tensor:
        return torch.rand(shape.hidden, generator=source) + 0.5

    layers = [
        LayerWeights(
            scale(),
            matrix(shape.qkv, shape.hidden),
            matrix(shape.hidden, shape.heads * shape.dim),
            scale(),
            matrix(shape.inner, shape.hidden),
            matrix(shape.inner, shape.hidden),
            matrix(shape.hidden, shape.inner),
        )
        for _ in range(shape.layers)
    ]
    return matrix(shape.vocab, shape.hidden) * 5, layers, matrix(shape.vocab, shape.hidden)


def make_inputs(shape: DecoderShape, batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Token ids and rotary phases."""
    source = torch.Generator().manual_seed(5)
    tokens = batch.slots.shape[0]
    angles = torch.randn((tokens, shape.dim // 2), generator=source)
    ids = torch.randint(0, shape.vocab, (tokens,), generator=source)
    return ids, torch.stack((angles.cos(), angles.sin()), -1).contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=["odd", "grouped", "one KV head"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_mixed_step(library: NativeLibrary, threads: int, shape: DecoderShape, tied: bool) -> None:
    """Decodes, chunks and prompts in one step: hidden states, logits and the cache."""
    embedding, layers, head = make_weights(shape)
    norm = torch.rand(shape.hidden, generator=torch.Generator().manual_seed(1))
    decoder = NativeDecoder(
        library, shape, lambda: embedding, iter(layers), norm=norm, head=None if tied else lambda: head
    )
    memory, batch = make_step(MIXED, (shape.heads, shape.kv_heads, shape.dim), 16, shape.layers)
    expected_memory = memory.clone()
    ids, phases = make_inputs(shape, batch)
    expected = decoder_forward(
        shape, embedding, layers, token_ids=ids, phases=phases, memory=expected_memory, batch=batch
    )
    got = decoder.forward(ids, phases, memory, batch)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(memory, expected_memory, atol=2e-4, rtol=1e-4, equal_nan=True)
    logits = linear(rms_norm(expected, norm, shape.eps), embedding if tied else head)
    torch.testing.assert_close(decoder.logits(got), logits, atol=1e-3, rtol=1e-3)


def test_a_token_is_the_same_bits_in_any_batch(library: NativeLibrary, threads: int) -> None:
    """A prompt at once, in random chunks, and token by token beside others: hidden states and cache are equal."""
    shape = SHAPES[1]
    embedding, layers, _ = make_weights(shape)
    decoder = NativeDecoder(library, shape, lambda: embedding, iter(layers), norm=torch.ones(shape.hidden))
    length, source = 90, random.Random(4)
    memory, whole = make_step(((length, length), (20, 20)), (shape.heads, shape.kv_heads, shape.dim), 16, shape.layers)
    ids, phases = make_inputs(shape, whole)
    fresh = memory.clone()
    expected = decoder.forward(ids, phases, memory, whole)
    for largest in (1, 30):
        again, first, beside = fresh.clone(), 0, 0
        while first < length:
            count = min(source.randint(1, largest), length - first)
            tokens = list(range(first, first + count)) + ([length + beside] if beside < 20 else [])
            rows = [first + count] + ([beside + 1] if beside < 20 else [])
            starts = [0, count] + ([count + 1] if beside < 20 else [])
            part = PagedBatch(
                torch.tensor(starts), torch.tensor(rows), whole.tables[: len(rows)], whole.slots[tokens].contiguous()
            )
            got = decoder.forward(ids[tokens], phases[tokens].contiguous(), again, part)
            assert torch.equal(got, expected[tokens])
            first, beside = first + count, beside + 1
        own = whole.tables[0, : -(-length // 16)]
        assert torch.equal(again[own].nan_to_num(7.0), memory[own].nan_to_num(7.0))


def test_what_does_not_fit_is_refused(library: NativeLibrary) -> None:
    """Another model's cache, a token that does not exist, weights of another shape: an error, and nothing written."""
    shape = SHAPES[0]
    embedding, layers, _ = make_weights(shape)
    norm = torch.ones(shape.hidden)
    decoder = NativeDecoder(library, shape, lambda: embedding, iter(layers), norm=norm)
    memory, batch = make_step(((1, 5),), (6, 3, 10), 16)
    before = memory.clone()
    ids, phases = make_inputs(shape, batch)
    for bad in (-1, shape.vocab):
        with pytest.raises(ValueError, match="token"):
            decoder.forward(torch.tensor([bad]), phases, memory, batch)
    with pytest.raises(ValueError, match="another model's"):
        decoder.forward(ids, phases, make_step(((1, 5),), (6, 2, 10), 16)[0], batch)
    with pytest.raises(ValueError, match="phases"):
        decoder.forward(ids, phases.repeat(2, 1, 1), memory, batch)
    torch.testing.assert_close(memory, before, atol=0, rtol=0, equal_nan=True)
    with pytest.raises(ValueError, match="layers: 1 given"):
        NativeDecoder(library, shape, lambda: embedding, iter(layers[:1]), norm=norm)
    with pytest.raises(ValueError, match="weight: "):
        NativeDecoder(library, shape, lambda: embedding[:-1], iter(layers), norm=norm)


def test_weights_are_kept_once(library: NativeLibrary) -> None:
    """A tied embedding is not doubled; padding is that of the last panels."""
    shape = DecoderShape(vocab=320, hidden=64, heads=4, kv_heads=2, dim=16, inner=96, layers=2, eps=1e-5)
    embedding, layers, _ = make_weights(shape)
    decoder = NativeDecoder(library, shape, lambda: embedding, iter(layers), norm=torch.ones(shape.hidden))
    matrices = [embedding, *(weight for layer in layers for weight in layer if weight.dim() == 2)]
    assert decoder.nbytes == sum(weight.nbytes for weight in matrices)


@pytest.mark.parametrize("width", [1, 7, 16, 33, 576])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_the_norm(library: NativeLibrary, threads: int, width: int, rows: int) -> None:
    """Odd widths, no rows, and a row of zeros."""
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn((rows, width), generator=source), torch.rand(width, generator=source)
    x[:1] = 0
    got = norm_native.rms_norm(library, x, weight, 1e-5)
    torch.testing.assert_close(got.double(), rms_norm(x.double(), weight.double(), 1e-5), atol=1e-6, rtol=1e-5)
