"""A decoder in C++: one call for a step, however its rows are mixed."""

import ctypes
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kvferry_kernels.decoder.shape import DecoderShape, LayerWeights
from kvferry_kernels.linear.native import PackedWeight, linear
from kvferry_kernels.native import structs
from kvferry_kernels.native.arena import Arena
from kvferry_kernels.native.arguments import batch_of, cache_of, floats, integers
from kvferry_kernels.native.library import NativeLibrary
from kvferry_kernels.paged import PagedBatch
from kvferry_kernels.paged_attention.native import unsupported
from kvferry_kernels.rms_norm.native import rms_norm


class NativeDecoder:
    """Packed weights of a decoder and of its output layer. Serves one thread: its work memory is reused.

    Args:
        embedding: reads float32 [vocab, hidden]; given up once it is packed, before the layers are read.
        layers: ``shape.layers`` of them, taken one by one; each is packed and given up before the next is asked for.
        norm: float32 [hidden], before the output layer.
        head: reads the output layer [vocab, hidden]; ``None`` where it is the embedding (tied), which is kept once.

    Raises:
        ValueError: shapes that are not supported or do not fit.
    """

    def __init__(
        self,
        library: NativeLibrary,
        shape: DecoderShape,
        embedding: Callable[[], Tensor],
        layers: Iterable[LayerWeights],
        *,
        norm: Tensor,
        head: Callable[[], Tensor] | None = None,
    ) -> None:
        reason = unsupported(library, shape.heads, shape.kv_heads, shape.dim)
        if reason:
            raise ValueError(f"decoder: {reason}")
        self._library = library
        self._shape = shape
        self._arena = Arena(_floats(library, shape, tied=head is None))
        self._embedding = self._pack(embedding(), (shape.vocab, shape.hidden))
        self._layers = [self._take(layer) for layer in layers]
        if len(self._layers) != shape.layers:
            raise ValueError(f"layers: {len(self._layers)} given; {shape.layers} are accepted")
        self._norm = floats("norm", norm, (shape.hidden,))
        self._head = self._embedding if head is None else self._pack(head(), (shape.vocab, shape.hidden))
        self._weights = (structs.Layer * shape.layers)(*(layer.pointers() for layer in self._layers))
        self._struct = structs.Decoder(
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.dim,
            shape.inner,
            shape.layers,
            shape.vocab,
            shape.eps,
            self._embedding.data.data_ptr(),
            ctypes.cast(self._weights, ctypes.c_void_p),
        )
        self._work_floats = library.c.kvf_work_floats(ctypes.byref(self._struct))
        self._work = torch.empty(0)

    def forward(self, token_ids: Tensor, phases: Tensor, memory: Tensor, batch: PagedBatch) -> Tensor:
        """See the reference: float32 [T, hidden].

        Raises:
            ValueError: tensors that do not fit, or a token, block or slot that does not exist; nothing was written.
        """
        cache, numbers = cache_of(memory), batch_of(batch)
        ids = integers("token_ids", token_ids, (numbers.tokens,))
        turns = floats("phases", phases, (numbers.tokens, self._shape.dim // 2, 2))
        hidden = torch.empty((numbers.tokens, self._shape.hidden))
        if self._work.numel() < numbers.tokens * self._work_floats:
            self._work = torch.empty(numbers.tokens * self._work_floats)
        step = structs.Step(ids.data_ptr(), turns.data_ptr(), hidden.data_ptr(), self._work.data_ptr())
        status = self._library.c.kvf_forward(
            self._library.threads(),
            ctypes.byref(self._struct),
            ctypes.byref(cache),
            ctypes.byref(numbers),
            ctypes.byref(step),
        )
        if status:
            raise ValueError("decoder: the cache is another model's, or a token, block or slot does not exist")
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output layer: [R, hidden] -> float32 [R, vocab]."""
        return linear(self._library, rms_norm(self._library, hidden, self._norm, self._shape.eps), self._head)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self._arena.nbytes

    def _pack(self, weight: Tensor, shape: tuple[int, int]) -> PackedWeight:
        if tuple(weight.shape) != shape:
            raise ValueError(f"weight: {list(weight.shape)} given; {list(shape)} is accepted")
        return PackedWeight(self._library, weight, self._arena.take(self._library.packed_floats(*shape)))

    def _take(self, layer: LayerWeights) -> "_PackedLayer":
        shape = self._shape
        return _PackedLayer(
            floats("attention_norm", layer.attention_norm, (shape.hidden,)),
            self._pack(layer.qkv, (shape.qkv, shape.hidden)),
            self._pack(layer.output, (shape.hidden, shape.heads * shape.dim)),
            floats("mlp_norm", layer.mlp_norm, (shape.hidden,)),
            self._pack(layer.gate, (shape.inner, shape.hidden)),
            self._pack(layer.up, (shape.inner, shape.hidden)),
            self._pack(layer.down, (shape.hidden, shape.inner)),
        )


class _PackedLayer(NamedTuple):
    """One layer's tensors, in the order of ``kvf_layer``; they must outlive their pointers."""

    attention_norm: Tensor
    qkv: PackedWeight
    output: PackedWeight
    mlp_norm: Tensor
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight

    def pointers(self) -> structs.Layer:
        tensors = (part.data if isinstance(part, PackedWeight) else part for part in self)
        return structs.Layer(*(tensor.data_ptr() for tensor in tensors))


def _floats(library: NativeLibrary, shape: DecoderShape, *, tied: bool) -> int:
    """Floats of all packed weights, each rounded up as the arena does."""
    layer = (
        (shape.qkv, shape.hidden),
        (shape.hidden, shape.heads * shape.dim),
        (shape.inner, shape.hidden),
        (shape.inner, shape.hidden),
        (shape.hidden, shape.inner),
    )
    once = Arena.rounded(library.packed_floats(shape.vocab, shape.hidden))
    per_layer = sum(Arena.rounded(library.packed_floats(*weight)) for weight in layer)
    return once * (1 if tied else 2) + shape.layers * per_layer
