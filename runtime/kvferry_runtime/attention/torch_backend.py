"""Paged attention with plain torch operators: any CPU, any float dtype.

Rows with one query (decodes) are attended in groups: their blocks are gathered into a work buffer whose layout is the
one that fused attention reads, [K|V, row, kv_head, slot, dim], with one copy of ``block_size * head_dim`` values at a
time. A group holds rows of like length, so that padding stays under a quarter of what is read. Rows with more queries
(prefill) are attended one by one. Grouped heads are never repeated: the query heads of one KV head are further queries
of the same keys (decode), or a head dimension of stride 0 (prefill).

Padding reads the null block and the zero tail of open blocks (see ``exec.kv_memory``), so it is finite and the mask
removes it. A back end object holds the work buffer and serves one thread.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvferry_runtime.attention.backend import AttentionBatch
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.layers.kernels import TORCH_KERNELS, Kernels
from kvferry_runtime.model.config import ModelConfig

NAME = "torch"

_GROUP_BYTES = 16 * 2**20  # of gathered K and V in one decode group
_WASTE = 0.25  # of a group's gathered slots that may be padding
_QUERY_CHUNK = 512  # queries of one row attended at once where a mask is needed


def supports(config: ModelConfig, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> str:
    """Serves every full-attention model in floating point."""
    del config, device, kernels
    return "" if dtype.is_floating_point else f"computes in floating point, not {dtype}"


def make(config: ModelConfig, kernels: Kernels = TORCH_KERNELS) -> "TorchAttention":
    """The back end for a model."""
    del kernels
    return TorchAttention(config.heads)


class TorchAttention:
    """See ``AttentionBackend``."""

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self._work = torch.empty(0)

    def begin(self, kv: KVMemory, batch: AttentionBatch) -> "TorchStep":
        """See ``AttentionBackend.begin``."""
        if batch.open_blocks.numel():
            kv.clear_blocks(batch.open_blocks)
        memory = kv.tensor(0)
        geometry = _Geometry.of(memory)
        starts = batch.query_starts.tolist()
        contexts = batch.context_lens.tolist()
        decodes = [row for row in range(len(contexts)) if starts[row + 1] - starts[row] == 1]
        prefills = [row for row in range(len(contexts)) if starts[row + 1] - starts[row] > 1]
        groups = [
            _DecodeGroup.plan(geometry, rows, starts, contexts, batch.block_tables)
            for rows in _group_rows(decodes, contexts, geometry)
        ]
        runs = [
            _PrefillRow.plan(geometry, (starts[row], starts[row + 1]), contexts[row], batch.block_tables[row])
            for row in prefills
        ]
        needed = max(
            [*(group.index.numel() for group in groups), *(run.index.numel() for run in runs if run.index is not None)],
            default=0,
        )
        return TorchStep(memory, batch.slots, groups, runs, self._buffer(memory, geometry, needed))

    def _buffer(self, memory: Tensor, geometry: "_Geometry", pieces: int) -> Tensor:
        """The work buffer as [pieces, block_size * head_dim], grown where needed."""
        width = geometry.slots * geometry.dim
        if self._work.dtype != memory.dtype or self._work.numel() < pieces * width:
            self._work = torch.empty(pieces * width, dtype=memory.dtype, device=memory.device)
        return self._work[: pieces * width].view(pieces, width)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The shape of a KV group, and where things lie in it."""

    layers: int
    kv_heads: int
    slots: int
    dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, memory: Tensor) -> "_Geometry":
        _, layers, _, kv_heads, slots, dim = memory.shape
        return cls(layers, kv_heads, slots, dim, memory.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, K and V."""
        return 2 * self.kv_heads * self.slots * self.dim * self.dtype.itemsize

    def pieces(self, tables: Tensor) -> Tensor:
        """Which rows of [blocks * layers * 2 * kv_heads, slots * dim] hold these blocks in layer 0.

        [rows, n] block ids -> flat [2 * rows * kv_heads * n], in the order of the work buffer.
        """
        side = torch.arange(2).view(2, 1, 1, 1)
        head = torch.arange(self.kv_heads).view(1, 1, -1, 1)
        return ((tables.unsqueeze(0).unsqueeze(2) * (2 * self.layers) + side) * self.kv_heads + head).flatten()

    def targets(self, slots: Tensor) -> Tensor:
        """Which rows of [blocks * layers * 2 * kv_heads * slots, dim] take K and V of these slots in layer 0.

        [T] -> flat [T * 2 * kv_heads], K's heads before V's.
        """
        block, offset = slots // self.slots, slots % self.slots
        sides_heads = torch.arange(2 * self.kv_heads)
        first = (block * (2 * self.layers * self.kv_heads)).unsqueeze(1) + sides_heads
        return (first * self.slots + offset.unsqueeze(1)).flatten()


def _group_rows(decodes: list[int], contexts: list[int], geometry: _Geometry) -> list[list[int]]:
    """Split rows into groups of like length; one group in the given order where that wastes little."""
    if not decodes:
        return []
    blocks = {row: -(-contexts[row] // geometry.slots) for row in decodes}
    longest = max(blocks.values())
    limit = max(1, _GROUP_BYTES // geometry.block_bytes)
    if longest * len(decodes) <= limit and sum(blocks.values()) >= (1 - _WASTE) * longest * len(decodes):
        return [decodes]
    groups: list[list[int]] = []
    total = 0  # blocks of the open group without padding
    for row in sorted(decodes, key=lambda item: (-blocks[item], item)):
        if groups:
            padded = blocks[groups[-1][0]] * (len(groups[-1]) + 1)
            if padded <= limit and total + blocks[row] >= (1 - _WASTE) * padded:
                groups[-1].append(row)
                total += blocks[row]
                continue
        groups.append([row])
        total = blocks[row]
    return groups


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one query each."""

    tokens: slice | Tensor  # where their queries lie
    rows: int
    width: int  # slots read of each row
    index: Tensor  # see `_Geometry.pieces`
    mask: Tensor | None  # [rows, 1, 1, width], added to the scores

    @classmethod
    def plan(
        cls,
        geometry: _Geometry,
        rows: list[int],
        starts: list[int],
        contexts: list[int],
        tables: Tensor,
    ) -> "_DecodeGroup":
        lengths = [contexts[row] for row in rows]
        blocks = -(-max(lengths) // geometry.slots)
        width = max(lengths)
        tokens = [starts[row] for row in rows]
        contiguous = tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        picked = tables[rows[0] : rows[0] + 1] if len(rows) == 1 else tables[torch.tensor(rows)]
        mask = None
        if min(lengths) < width:
            behind = torch.arange(width) >= torch.tensor(lengths).unsqueeze(1)
            mask = torch.zeros(behind.shape, dtype=geometry.dtype).masked_fill_(behind, float("-inf"))[:, None, None]
        return cls(
            tokens=slice(tokens[0], tokens[0] + len(tokens)) if contiguous else torch.tensor(tokens),
            rows=len(rows),
            width=width,
            index=geometry.pieces(picked[:, :blocks]),
            mask=mask,
        )


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A row with more than one query."""

    start: int
    end: int
    context: int
    index: Tensor | None  # None: the row's keys are those of this step, nothing is read
    masks: tuple[tuple[int, int, Tensor | None], ...]  # query chunks: first, last + 1, [queries, context] added

    @classmethod
    def plan(cls, geometry: _Geometry, tokens: tuple[int, int], context: int, table: Tensor) -> "_PrefillRow":
        start, end = tokens
        queries = end - start
        if queries == context:
            return cls(start, end, context, None, ((0, queries, None),))
        blocks = -(-context // geometry.slots)
        masks: list[tuple[int, int, Tensor | None]] = []
        for first in range(0, queries, _QUERY_CHUNK):
            last = min(first + _QUERY_CHUNK, queries)
            own = torch.arange(context - queries + first, context - queries + last).unsqueeze(1)
            seen = context - queries + last  # keys that the chunk's last query sees
            later = torch.arange(seen) > own
            masks.append(
                (first, last, torch.zeros(later.shape, dtype=geometry.dtype).masked_fill_(later, float("-inf")))
            )
        return cls(start, end, context, geometry.pieces(table[:blocks].unsqueeze(0)), tuple(masks))


class TorchStep:
    """See ``AttentionStep``."""

    def __init__(
        self,
        memory: Tensor,
        slots: Tensor,
        groups: list[_DecodeGroup],
        runs: list[_PrefillRow],
        work: Tensor,
    ) -> None:
        geometry = _Geometry.of(memory)
        self._geometry = geometry
        self._groups = groups
        self._runs = runs
        self._work = work
        self._targets = geometry.targets(slots)
        # A layer is an offset into both views, so that one index serves all layers.
        self._pieces = memory.view(-1, geometry.slots * geometry.dim)
        self._vectors = memory.view(-1, geometry.dim)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``AttentionStep.forward``."""
        geometry = self._geometry
        first = layer * 2 * geometry.kv_heads
        both = torch.cat((k, v), 1).view(-1, geometry.dim)
        self._vectors[first * geometry.slots :].index_copy_(0, self._targets, both)
        pieces = self._pieces[first:]
        if len(self._groups) == 1 and not self._runs and isinstance(self._groups[0].tokens, slice):
            return self._decode(self._groups[0], pieces, q)
        out = torch.empty_like(q)
        for group in self._groups:
            out[group.tokens] = self._decode(group, pieces, q[group.tokens])
        for run in self._runs:
            out[run.start : run.end] = self._prefill(run, pieces, q[run.start : run.end], k, v)
        return out

    def _decode(self, group: _DecodeGroup, pieces: Tensor, q: Tensor) -> Tensor:
        """[rows, heads, dim] -> the same shape."""
        geometry = self._geometry
        keys, values = self._gather(group.index, pieces, group.rows, group.width)
        grouped = q.reshape(group.rows, geometry.kv_heads, -1, geometry.dim)
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask).reshape(q.shape)

    def _prefill(self, run: _PrefillRow, pieces: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The row's queries [n, heads, dim] -> the same shape; ``k`` and ``v`` are those of the whole step."""
        geometry = self._geometry
        if run.index is None:
            keys, values = (x[run.start : run.end].transpose(0, 1).unsqueeze(1) for x in (k, v))
        else:
            keys, values = (x.transpose(0, 1) for x in self._gather(run.index, pieces, 1, run.context))
        shared = q.shape[1] // geometry.kv_heads  # query heads of one KV head
        queries = q.view(-1, geometry.kv_heads, shared, geometry.dim).permute(1, 2, 0, 3)
        parts: list[Tensor] = []
        for first, last, mask in run.masks:
            seen = run.context if mask is None else mask.shape[1]
            parts.append(
                scaled_dot_product_attention(
                    queries[:, :, first:last],
                    keys[:, :, :seen].expand(-1, shared, -1, -1),
                    values[:, :, :seen].expand(-1, shared, -1, -1),
                    attn_mask=mask,
                    is_causal=mask is None,
                )
            )
        attended = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return attended.permute(2, 0, 1, 3).reshape(q.shape)

    def _gather(self, index: Tensor, pieces: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, each [rows, kv_heads, width, dim], valid until the next gather."""
        geometry = self._geometry
        out = self._work[: index.numel()]
        torch.index_select(pieces, 0, index, out=out)
        both = out.view(2, rows, geometry.kv_heads, -1, geometry.dim)[..., :width, :]
        return both[0], both[1]
