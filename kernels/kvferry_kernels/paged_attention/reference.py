"""What attention computes, in plain torch, one query after another."""

import torch
from torch import Tensor

from kvferry_kernels.paged import PagedBatch


def paged_attention(q: Tensor, memory: Tensor, layer: int, batch: PagedBatch) -> Tensor:
    """softmax(q k^T / sqrt(dim)) v for each query over the positions up to its own, in float64.

    Args:
        q: [T, heads, dim]; query heads h of one KV head lie side by side.
        memory: [blocks, layers, K|V, kv_heads, block_size, dim], K and V of the step already written.

    Returns:
        [T, heads, dim], of q's dtype.
    """
    out = torch.empty_like(q)
    starts = batch.starts.tolist()
    for row, context in enumerate(batch.contexts.tolist()):
        for token in range(starts[row], starts[row + 1]):
            length = context - (starts[row + 1] - token) + 1
            out[token] = _attend(q[token], memory[:, layer], batch.tables[row], length)
    return out


def _attend(q: Tensor, memory: Tensor, table: Tensor, length: int) -> Tensor:
    """One query over the first ``length`` positions of its table: [heads, dim]."""
    _, _, kv_heads, block_size, dim = memory.shape
    positions = torch.arange(length)
    blocks, offsets = table[positions // block_size], positions % block_size
    k, v = (memory[blocks, side, :, offsets].double().transpose(0, 1) for side in (0, 1))  # [kv_heads, length, dim]
    scores = q.double().view(kv_heads, -1, dim) @ k.transpose(1, 2) / dim**0.5
    attended: Tensor = scores.softmax(-1) @ v
    return attended.reshape(q.shape).to(q.dtype)
