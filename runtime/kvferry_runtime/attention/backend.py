"""One step's rows as attention sees them, and what an attention back end is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.layers.kernels import TORCH_KERNELS, Kernels
from kvferry_runtime.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step's rows, flattened. All tensors are int64; ``T`` is the sum of the rows' query lengths.

    A row is a run of consecutive positions of one sequence: a decode (one token), a prefill chunk, or a whole prompt.
    """

    query_starts: Tensor  # [rows + 1]: row i owns tokens query_starts[i] .. query_starts[i + 1] - 1
    context_lens: Tensor  # [rows]: tokens of the sequence that are in KV after this step
    block_tables: Tensor  # [rows, max_blocks]: block ids in order of position, 0 behind the last one needed
    slots: Tensor  # [T]: block * block_size + offset, where each token's K and V go
    open_blocks: Tensor  # [n]: blocks whose first slot this step writes and which it does not fill

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
    ) -> "AttentionBatch":
        """Make a batch from the rows' own numbers.

        Args:
            query_lens: tokens each row computes in this step, at least 1.
            context_lens: tokens in KV after the step, the queries included.
            block_tables: block ids of each row; more blocks than needed are allowed and left out.
            block_size: slots of a block.

        Raises:
            ValueError: lengths that do not fit together, too short a table, or a block id below 1.
        """
        if not len(query_lens) == len(context_lens) == len(block_tables) or not query_lens:
            raise ValueError("query_lens, context_lens and block_tables: one entry per row, at least one row")
        starts = [0]
        tables: list[list[int]] = []
        slots: list[int] = []
        open_blocks: list[int] = []
        for row, (queries, context, table) in enumerate(zip(query_lens, context_lens, block_tables, strict=True)):
            needed = -(-context // block_size)
            if not 1 <= queries <= context:
                raise ValueError(f"row {row}: {queries} queries of {context} tokens; 1..{context} are accepted")
            if len(table) < needed:
                raise ValueError(f"row {row}: {len(table)} blocks for {context} tokens; {needed} are needed")
            used = list(table[:needed])
            if min(used) < 1:
                raise ValueError(f"row {row}: block {min(used)} in its table; ids from 1 are accepted")
            first = context - queries
            slots += [
                used[position // block_size] * block_size + position % block_size for position in range(first, context)
            ]
            tail = context % block_size
            if tail and first <= context - tail:
                open_blocks.append(used[-1])
            starts.append(starts[-1] + queries)
            tables.append(used)
        width = max(len(table) for table in tables)
        padded = [table + [0] * (width - len(table)) for table in tables]
        return cls(
            query_starts=torch.tensor(starts, dtype=torch.int64),
            context_lens=torch.tensor(list(context_lens), dtype=torch.int64),
            block_tables=torch.tensor(padded, dtype=torch.int64),
            slots=torch.tensor(slots, dtype=torch.int64),
            open_blocks=torch.tensor(open_blocks, dtype=torch.int64),
        )


class AttentionStep(Protocol):
    """One step's attention, planned once and used by each layer."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the step's K and V of a layer, then attend causally through the block tables.

        Args:
            layer: index within the KV group.
            q: [T, heads, head_dim], rotated.
            k: [T, kv_heads, head_dim], rotated. v: the same shape. Neither is kept.

        Returns:
            [T, heads, head_dim], of q's dtype.
        """
        ...


class AttentionBackend(Protocol):
    """Computes softmax(q k^T / sqrt(head_dim)) v for each query over the positions up to its own."""

    def begin(self, kv: KVMemory, batch: AttentionBatch) -> AttentionStep:
        """Plan one step over KV group 0, and clear ``batch.open_blocks``."""
        ...


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A registered back end: how to make it, and whether it can serve a model."""

    make: Callable[[ModelConfig, Kernels], AttentionBackend]
    supports: Callable[[ModelConfig, torch.device, torch.dtype, Kernels], str]  # "" or the reason why not


_REGISTRY: dict[str, BackendEntry] = {}


def register(name: str, entry: BackendEntry) -> None:
    """Add a back end. Raises ``ValueError`` when the name is taken."""
    if name in _REGISTRY:
        raise ValueError(f"attention back end {name!r} is registered already")
    _REGISTRY[name] = entry


def reasons(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, kernels: Kernels = TORCH_KERNELS
) -> dict[str, str]:
    """Each back end's name with "ok" or the reason why it cannot serve the model; in order of preference."""
    _load_builtin()
    return {name: entry.supports(config, device, dtype, kernels) or "ok" for name, entry in _REGISTRY.items()}


def make_backend(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    name: str = "auto",
    kernels: Kernels = TORCH_KERNELS,
) -> tuple[str, AttentionBackend]:
    """The back end of this name, or with ``auto`` the first one that can serve the model.

    Args:
        kernels: the operators that the engine was given; ``native`` needs those in C++.

    Raises:
        ValueError: no such back end, or it cannot serve the model; the message holds its reason.
    """
    answers = reasons(config, device, dtype, kernels)
    if name != "auto" and name not in answers:
        raise ValueError(f"attention back end: {name!r} given; accepted: auto, {', '.join(answers)}")
    for candidate in answers if name == "auto" else (name,):
        if answers[candidate] == "ok":
            return candidate, _REGISTRY[candidate].make(config, kernels)
    listed = "; ".join(f"{key}: {reason}" for key, reason in answers.items())
    raise ValueError(f"attention back end: {name!r} cannot serve this model ({listed})")


def _load_builtin() -> None:
    from kvferry_runtime.attention import native_backend, reference, torch_backend

    for module in (native_backend, torch_backend, reference):
        if module.NAME not in _REGISTRY:
            register(module.NAME, BackendEntry(make=module.make, supports=module.supports))
