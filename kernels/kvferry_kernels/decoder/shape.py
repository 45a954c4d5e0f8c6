"""What a Llama decoder consists of."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder; ``inner`` is the width of the MLP."""

    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    layers: int
    eps: float

    @property
    def qkv(self) -> int:
        """Outputs of the product that makes queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.dim


class LayerWeights(NamedTuple):
    """Of one layer, as a checkpoint has them; rows of queries and keys are in the order of interleaved rotation."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [qkv, hidden]: queries, keys, values
    output: Tensor  # [hidden, heads * dim]
    mlp_norm: Tensor  # [hidden]
    gate: Tensor  # [inner, hidden]
    up: Tensor  # [inner, hidden]
    down: Tensor  # [hidden, inner]
