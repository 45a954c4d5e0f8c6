"""Paged attention in C++: reads keys and values where they lie, block by block, and nothing behind a row's context."""

import torch
from torch import Tensor

from kvferry_kernels.native.library import NativeLibrary
from kvferry_kernels.paged import PagedBatch
from kvferry_kernels.paged_attention.native import paged_attention, unsupported
from kvferry_kernels.rope_write.native import write
from kvferry_runtime.attention.backend import AttentionBatch
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.layers.kernels import Kernels
from kvferry_runtime.model.config import ModelConfig

NAME = "native"


def supports(config: ModelConfig, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> str:
    """Serves float32 on the CPU, where there is a library."""
    if device.type != "cpu" or dtype != torch.float32:
        return f"computes float32 on the CPU, not {str(dtype).removeprefix('torch.')} on {device.type}"
    if kernels.library is None:
        return kernels.reason
    return unsupported(kernels.library, config.heads, config.kv_heads, config.head_dim)


def make(config: ModelConfig, kernels: Kernels) -> "NativeAttention":
    """The back end for a model. Raises ``ValueError`` without a library."""
    del config
    if kernels.library is None:
        raise ValueError(f"attention back end native: {kernels.reason}")
    return NativeAttention(kernels.library)


def begin_rows(kv: KVMemory, batch: AttentionBatch) -> PagedBatch:
    """What a step does first: clear the blocks that it opens. Its rows as the operators take them."""
    if batch.open_blocks.numel():
        kv.clear_blocks(batch.open_blocks)
    return PagedBatch(batch.query_starts, batch.context_lens, batch.block_tables, batch.slots)


class NativeAttention:
    """See ``AttentionBackend``."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def begin(self, kv: KVMemory, batch: AttentionBatch) -> "NativeStep":
        """See ``AttentionBackend.begin``."""
        return NativeStep(self._library, kv.tensor(0), begin_rows(kv, batch))


class NativeStep:
    """See ``AttentionStep``."""

    def __init__(self, library: NativeLibrary, memory: Tensor, rows: PagedBatch) -> None:
        self._library = library
        self._memory = memory
        self._rows = rows

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``AttentionStep.forward``."""
        write(self._library, k, v, memory=self._memory, layer=layer, batch=self._rows)
        return paged_attention(self._library, q, self._memory, layer, self._rows)
