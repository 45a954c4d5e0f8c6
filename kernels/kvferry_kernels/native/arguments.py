"""Tensors as the C interface takes them: checked before a pointer is passed on."""

import torch
from torch import Tensor

from kvferry_kernels.native import structs
from kvferry_kernels.paged import PagedBatch

_Shape = tuple[int | None, ...]


def floats(name: str, given: Tensor, shape: _Shape) -> Tensor:
    """``given`` if it is contiguous float32 on the CPU of this shape (None: any size); else ``ValueError``."""
    return _checked(name, given, torch.float32, shape)


def integers(name: str, given: Tensor, shape: _Shape) -> Tensor:
    """The same for int64."""
    return _checked(name, given, torch.int64, shape)


def _checked(name: str, given: Tensor, dtype: torch.dtype, shape: _Shape) -> Tensor:
    fits = given.dim() == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(given.shape, shape, strict=True)
    )
    if not fits or given.dtype != dtype or given.device.type != "cpu" or not given.is_contiguous():
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        found = f"{given.dtype} {list(given.shape)} on {given.device}"
        raise ValueError(f"{name}: {found} given; contiguous {dtype} [{sizes}] is accepted")
    return given


def cache_of(memory: Tensor) -> structs.Cache:
    """[blocks, layers, 2, kv_heads, block_size, dim]; ``memory`` must outlive the struct."""
    given = floats("memory", memory, (None, None, 2, None, None, None))
    blocks, layers, _, kv_heads, block_size, dim = given.shape
    return structs.Cache(given.data_ptr(), blocks, layers, kv_heads, block_size, dim)


def batch_of(batch: PagedBatch) -> structs.Batch:
    """``batch`` must outlive the struct."""
    rows = batch.contexts.shape[0]
    return structs.Batch(
        batch.slots.shape[0],
        rows,
        batch.tables.shape[1],
        integers("starts", batch.starts, (rows + 1,)).data_ptr(),
        integers("contexts", batch.contexts, (rows,)).data_ptr(),
        integers("tables", batch.tables, (rows, None)).data_ptr(),
        integers("slots", batch.slots, (None,)).data_ptr(),
    )
