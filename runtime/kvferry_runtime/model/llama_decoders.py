"""The layers of a Llama decoder in two makes: operator by operator, and all of them in one call of C++."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvferry_kernels.decoder.native import NativeDecoder
from kvferry_kernels.decoder.shape import LayerWeights
from kvferry_kernels.native.library import NativeLibrary
from kvferry_runtime.attention.backend import AttentionBackend, AttentionBatch, AttentionStep
from kvferry_runtime.attention.native_backend import begin_rows
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.layers.embedding import make_embedding
from kvferry_runtime.layers.kernels import Kernels
from kvferry_runtime.layers.linear import LinearKind, make_linear
from kvferry_runtime.layers.mlp import GatedMLP
from kvferry_runtime.layers.norm import RMSNorm
from kvferry_runtime.layers.rope import rotate
from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.llama_weights import LlamaWeights, decoder_shape


class Decoder(Protocol):
    """Embedding, layers, final norm and output layer."""

    def forward(self, token_ids: Tensor, phases: Tensor, kv: KVMemory, batch: AttentionBatch) -> Tensor:
        """``Model.forward`` with the rotary phases of each token, see ``layers.rope.phases_at``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab], of the model's dtype."""
        ...


class LayeredDecoder:
    """Operator by operator. Query, key and value are one product, gate and up another.

    Args:
        kind: the form of the weights. A tied embedding serves for reading and as the output layer.
        kernels: what ``native`` weights are multiplied by.
    """

    def __init__(self, weights: LlamaWeights, attention: AttentionBackend, kind: LinearKind, kernels: Kernels) -> None:
        config = weights.config
        self._attention = attention
        self._embedding = make_embedding(weights.embedding(), kind, kernels, tied=config.tied_embeddings)
        self._layers = [
            LlamaLayer(index, config, weights.layer(index), kind, kernels) for index in range(config.layers)
        ]
        self._norm = RMSNorm(weights.norm(), config.norm_eps)
        self._head: Callable[[Tensor], Tensor] = (
            self._embedding.logits if config.tied_embeddings else make_linear(weights.head(), kind, kernels)
        )

    def forward(self, token_ids: Tensor, phases: Tensor, kv: KVMemory, batch: AttentionBatch) -> Tensor:
        """See ``Decoder.forward``."""
        attention = self._attention.begin(kv, batch)
        x = self._embedding.rows(token_ids)
        for layer in self._layers:
            x = layer.forward(x, phases, attention)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Decoder.logits``."""
        return self._head(self._norm(hidden))


class LlamaLayer:
    """One decoder layer: attention and MLP, each behind a norm and added to its input."""

    def __init__(
        self, index: int, config: ModelConfig, weights: LayerWeights, kind: LinearKind, kernels: Kernels
    ) -> None:
        self._index = index
        self._heads = config.heads
        self._kv_heads = config.kv_heads
        self._dim = config.head_dim
        self._attention_norm = RMSNorm(weights.attention_norm, config.norm_eps)
        self._qkv = make_linear(weights.qkv, kind, kernels)
        self._output = make_linear(weights.output, kind, kernels)
        self._mlp_norm = RMSNorm(weights.mlp_norm, config.norm_eps)
        gate_up = make_linear(torch.cat((weights.gate, weights.up)), kind, kernels)
        self._mlp = GatedMLP(gate_up, make_linear(weights.down, kind, kernels), config.intermediate_size)

    def forward(self, x: Tensor, phases: Tensor, attention: AttentionStep) -> Tensor:
        """[T, hidden] -> [T, hidden]; ``x`` is overwritten."""
        qkv = self._qkv(self._attention_norm(x)).view(x.shape[0], -1, self._dim)
        rotated = rotate(qkv[:, : self._heads + self._kv_heads], phases)
        attended = attention.forward(
            self._index,
            rotated[:, : self._heads],
            rotated[:, self._heads :],
            qkv[:, self._heads + self._kv_heads :],
        )
        x.add_(self._output(attended.reshape(x.shape[0], -1)))
        return x.add_(self._mlp(self._mlp_norm(x)))


class FusedDecoder:
    """A step is one call of C++. A token's result does not depend on what it is computed together with."""

    def __init__(self, weights: LlamaWeights, library: NativeLibrary) -> None:
        config = weights.config
        self._decoder = NativeDecoder(
            library,
            decoder_shape(config),
            weights.embedding,
            (weights.layer(index) for index in range(config.layers)),
            norm=weights.norm(),
            head=None if config.tied_embeddings else weights.head,
        )

    def forward(self, token_ids: Tensor, phases: Tensor, kv: KVMemory, batch: AttentionBatch) -> Tensor:
        """See ``Decoder.forward``."""
        rows = begin_rows(kv, batch)
        turns = torch.view_as_real(phases.squeeze(1))
        return self._decoder.forward(token_ids, turns, kv.tensor(0), rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Decoder.logits``."""
        return self._decoder.logits(hidden)
