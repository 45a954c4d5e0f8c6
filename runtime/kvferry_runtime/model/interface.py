"""What the runner asks of a model."""

from typing import Protocol

from torch import Tensor

from kvferry_runtime.attention.backend import AttentionBatch
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.model.config import ModelConfig
from kvferry_wire.layout import KVGroup


class Model(Protocol):
    """A decoder that keeps no state of any sequence: all of it lies in the KV blocks."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV that one token needs; what ``KVMemory`` is made of."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, kv: KVMemory, batch: AttentionBatch) -> Tensor:
        """Compute a step's tokens: write their K and V at ``batch.slots`` and attend through the block tables.

        Args:
            token_ids: int64 [T], the rows' tokens one row after another.
            positions: int64 [T], counted from 0 in each sequence.
            kv: memory made of this model's ``kv_groups``.
            batch: which tokens belong to which row, and where its KV lies.

        Returns:
            [T, hidden_size]; of the model's own dtype. To be indexed by row and handed to ``logits``, nothing else.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token for chosen rows of ``forward``'s result: [R, hidden] -> float32 [R, vocab]."""
        ...
