"""What a decoder computes, made of the other operators' references."""

from collections.abc import Sequence

from torch import Tensor

from kvferry_kernels.decoder.shape import DecoderShape, LayerWeights
from kvferry_kernels.linear.reference import add_linear, gated_linear, linear, rows
from kvferry_kernels.paged import PagedBatch
from kvferry_kernels.paged_attention.reference import paged_attention
from kvferry_kernels.rms_norm.reference import rms_norm
from kvferry_kernels.rope_write.reference import rope_write


def decoder_forward(
    shape: DecoderShape,
    embedding: Tensor,
    layers: Sequence[LayerWeights],
    *,
    token_ids: Tensor,
    phases: Tensor,
    memory: Tensor,
    batch: PagedBatch,
) -> Tensor:
    """A step through all layers, before the final norm.

    Args:
        embedding: [vocab, hidden].
        token_ids: int64 [T].
        phases: [T, dim / 2, 2], see ``rope_write``.
        memory: [blocks, layers, K|V, kv_heads, block_size, dim]; the step's K and V are written to it.

    Returns:
        [T, hidden].
    """
    x = rows(embedding, token_ids)
    for index, layer in enumerate(layers):
        qkv = linear(rms_norm(x, layer.attention_norm, shape.eps), layer.qkv).reshape(x.shape[0], -1, shape.dim)
        rope_write(qkv, shape.heads, phases, memory=memory, layer=index, slots=batch.slots)
        attended = paged_attention(qkv[:, : shape.heads], memory, index, batch)
        add_linear(attended.flatten(1), layer.output, x)
        inner = gated_linear(rms_norm(x, layer.mlp_norm, shape.eps), layer.gate, layer.up)
        add_linear(inner, layer.down, x)
    return x
