"""Paged attention computed naively, one query after another in float64: the twin that the others are compared with."""

import torch
from torch import Tensor

from kvferry_runtime.attention.backend import AttentionBatch
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.layers.kernels import TORCH_KERNELS, Kernels
from kvferry_runtime.model.config import ModelConfig

NAME = "reference"


def supports(config: ModelConfig, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> str:
    """Serves every full-attention model in floating point; slowly."""
    del config, device, kernels
    return "" if dtype.is_floating_point else f"computes in floating point, not {dtype}"


def make(config: ModelConfig, kernels: Kernels = TORCH_KERNELS) -> "ReferenceAttention":
    """The back end for a model."""
    del config, kernels
    return ReferenceAttention()


class ReferenceAttention:
    """See ``AttentionBackend``."""

    def begin(self, kv: KVMemory, batch: AttentionBatch) -> "ReferenceStep":
        """See ``AttentionBackend.begin``."""
        if batch.open_blocks.numel():
            kv.clear_blocks(batch.open_blocks)
        return ReferenceStep(kv.tensor(0), batch)


class ReferenceStep:
    """See ``AttentionStep``."""

    def __init__(self, memory: Tensor, batch: AttentionBatch) -> None:
        self._memory = memory
        self._batch = batch

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``AttentionStep.forward``."""
        block_size = self._memory.shape[4]
        for token, slot in enumerate(self._batch.slots.tolist()):
            block, offset = divmod(slot, block_size)
            self._memory[block, layer, 0, :, offset] = k[token]
            self._memory[block, layer, 1, :, offset] = v[token]
        out = torch.empty_like(q)
        starts = self._batch.query_starts.tolist()
        for row, context in enumerate(self._batch.context_lens.tolist()):
            table = self._batch.block_tables[row].tolist()
            queries = starts[row + 1] - starts[row]
            for index in range(queries):
                length = context - queries + index + 1
                token = starts[row] + index
                out[token] = self._attend(layer, q[token], table, length)
        return out

    def _attend(self, layer: int, q: Tensor, table: list[int], length: int) -> Tensor:
        """One query over the first ``length`` slots of its table: [heads, head_dim]."""
        block_size = self._memory.shape[4]
        slots = [
            self._memory[table[position // block_size], layer, :, :, position % block_size]
            for position in range(length)
        ]
        kv = torch.stack(slots).double()  # [length, K|V, kv_heads, head_dim]
        heads, dim = q.shape
        grouped = q.double().view(kv.shape[2], -1, dim)
        scores = torch.einsum("hgd,lhd->hgl", grouped, kv[:, 0]) / dim**0.5
        return torch.einsum("hgl,lhd->hgd", scores.softmax(-1), kv[:, 1]).reshape(heads, dim).to(q.dtype)
