"""Rotation and writing in C++."""

import ctypes

from torch import Tensor

from kvferry_kernels.native.arguments import batch_of, cache_of, floats
from kvferry_kernels.native.library import NativeLibrary
from kvferry_kernels.paged import PagedBatch


def rope_write(
    library: NativeLibrary, qkv: Tensor, heads: int, phases: Tensor, *, memory: Tensor, layer: int, batch: PagedBatch
) -> None:
    """See the reference; ``qkv`` and ``phases`` are contiguous float32.

    Raises:
        ValueError: a shape that does not fit, a layer, block or slot outside of ``memory``.
    """
    cache, numbers = cache_of(memory), batch_of(batch)
    given = floats("qkv", qkv, (numbers.tokens, heads + 2 * cache.kv_heads, cache.dim))
    turns = floats("phases", phases, (numbers.tokens, cache.dim // 2, 2))
    status = library.c.kvf_rope_write(
        library.threads(),
        ctypes.byref(cache),
        ctypes.byref(numbers),
        layer,
        heads,
        turns.data_ptr(),
        given.data_ptr(),
    )
    if status:
        raise ValueError("rope_write: a layer, block or slot outside of the cache")


def write(library: NativeLibrary, k: Tensor, v: Tensor, *, memory: Tensor, layer: int, batch: PagedBatch) -> None:
    """Write k and v, float32 [T, kv_heads, dim], to the batch's slots of one layer."""
    cache, numbers = cache_of(memory), batch_of(batch)
    shape = (numbers.tokens, cache.kv_heads, cache.dim)
    keys, values = floats("k", k.contiguous(), shape), floats("v", v.contiguous(), shape)
    status = library.c.kvf_write(
        library.threads(),
        ctypes.byref(cache),
        ctypes.byref(numbers),
        layer,
        keys.data_ptr(),
        values.data_ptr(),
    )
    if status:
        raise ValueError("write: a layer, block or slot outside of the cache")
