"""What is rotated and written, in plain torch."""

import torch
from torch import Tensor


def rope_write(qkv: Tensor, heads: int, phases: Tensor, *, memory: Tensor, layer: int, slots: Tensor) -> None:
    """Rotate queries and keys in place and write K and V of one layer.

    Args:
        qkv: [T, heads + 2 * kv_heads, dim]: queries, keys, values.
        phases: [T, dim / 2, 2]: cosine and sine by which dimensions 2 i and 2 i + 1 turn together.
        memory: [blocks, layers, K|V, kv_heads, block_size, dim].
        slots: int64 [T]: block * block_size + offset.
    """
    kv_heads = memory.shape[3]
    turned = qkv[:, : heads + kv_heads]
    pairs = turned.reshape(*turned.shape[:2], -1, 2)
    cosine, sine = phases[:, None, :, 0], phases[:, None, :, 1]
    real = pairs[..., 0] * cosine - pairs[..., 1] * sine
    imaginary = pairs[..., 0] * sine + pairs[..., 1] * cosine
    turned.copy_(torch.stack((real, imaginary), -1).flatten(-2))
    write(qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :], memory, layer, slots)


def write(k: Tensor, v: Tensor, memory: Tensor, layer: int, slots: Tensor) -> None:
    """Write k and v [T, kv_heads, dim] to slots of one layer."""
    block_size = memory.shape[4]
    blocks, offsets = slots // block_size, slots % block_size
    memory[blocks, layer, 0, :, offsets] = k
    memory[blocks, layer, 1, :, offsets] = v
