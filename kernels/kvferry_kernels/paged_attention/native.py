"""Paged attention in C++. A query's result depends on its position and its context alone, not on the batch."""

import ctypes

import torch
from torch import Tensor

from kvferry_kernels.native.arguments import batch_of, cache_of
from kvferry_kernels.native.library import NativeLibrary
from kvferry_kernels.paged import PagedBatch


def unsupported(library: NativeLibrary, heads: int, kv_heads: int, dim: int) -> str:
    """Why these shapes cannot be computed; empty when they can."""
    if dim > library.max_dim:
        return f"heads of {dim} dimensions; at most {library.max_dim} are supported"
    return f"{heads} heads over {kv_heads} KV heads" if heads % kv_heads else ""


def paged_attention(library: NativeLibrary, q: Tensor, memory: Tensor, layer: int, batch: PagedBatch) -> Tensor:
    """See the reference; float32. Slots behind a row's context are not read.

    Raises:
        ValueError: shapes that are not supported, or a number outside of ``memory``.
    """
    cache, numbers = cache_of(memory), batch_of(batch)
    heads = q.shape[1]
    reason = unsupported(library, heads, cache.kv_heads, cache.dim)
    if reason:
        raise ValueError(f"q: {reason}")
    given = q if q.stride()[1:] == (cache.dim, 1) else q.contiguous()
    if given.dtype != torch.float32 or given.shape != (numbers.tokens, heads, cache.dim):
        raise ValueError(f"q: {list(q.shape)} {q.dtype} given; float32 [{numbers.tokens}, heads, {cache.dim}] accepted")
    out = torch.empty(given.shape)
    status = library.c.kvf_attend(
        library.threads(),
        ctypes.byref(cache),
        ctypes.byref(numbers),
        layer,
        heads,
        given.data_ptr(),
        given.stride(0),
        out.data_ptr(),
    )
    if status:
        raise ValueError("paged_attention: a layer, block, slot or length outside of the cache")
    return out
