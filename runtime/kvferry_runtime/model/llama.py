"""The Llama decoder (arXiv:2302.13971, with grouped queries), inference only, over flattened tokens.

Query, key and value are one product, gate and up another. Nothing of a sequence is kept here; all of it lies in KV.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvferry_runtime.attention.backend import AttentionBackend, AttentionBatch, AttentionStep
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.layers.embedding import make_embedding
from kvferry_runtime.layers.linear import LinearKind, make_linear
from kvferry_runtime.layers.mlp import GatedMLP
from kvferry_runtime.layers.norm import RMSNorm
from kvferry_runtime.layers.rope import interleave, inverse_frequencies, phases_at, rotate
from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.weights import WeightSource, check_weights
from kvferry_wire.layout import KVGroup

# Buffers that old checkpoints hold; they follow from the config.
_IGNORED = ("rotary_emb.inv_freq",)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape by name of a checkpoint of this config."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_out, kv_out = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (q_out, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_out, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_out, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_out)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class LlamaLayer:
    """One decoder layer: attention and MLP, each behind a norm and added to its input."""

    def __init__(self, index: int, config: ModelConfig, source: WeightSource, dtype: torch.dtype, kind: LinearKind):
        self._index = index
        self._heads = config.heads
        self._kv_heads = config.kv_heads
        self._dim = config.head_dim
        prefix = f"model.layers.{index}."

        def read(name: str) -> Tensor:
            return source.read(f"{prefix}{name}.weight", dtype)

        self._attention_norm = RMSNorm(read("input_layernorm"), config.norm_eps)
        queries = interleave(read("self_attn.q_proj"), config.heads)
        keys = interleave(read("self_attn.k_proj"), config.kv_heads)
        self._qkv = make_linear(torch.cat((queries, keys, read("self_attn.v_proj"))), kind)
        self._output = make_linear(read("self_attn.o_proj"), kind)
        self._mlp_norm = RMSNorm(read("post_attention_layernorm"), config.norm_eps)
        gate_up = make_linear(torch.cat((read("mlp.gate_proj"), read("mlp.up_proj"))), kind)
        self._mlp = GatedMLP(gate_up, make_linear(read("mlp.down_proj"), kind), config.intermediate_size)

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


class LlamaModel:
    """A Llama model of one checkpoint. See ``Model``.

    Args:
        source: open weights; read tensor by tensor, each given up once it is in the form of ``kind``.
        dtype: float32 or bfloat16, of weights, activations and KV.
        kind: the form of the weights. A tied embedding is kept once, for reading and for the output layer.

    Raises:
        ModelError: a tensor that lacks, is unknown, or has another shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        kind: LinearKind,
        attention: AttentionBackend,
    ) -> None:
        ignored = (*_IGNORED, "lm_head.weight") if config.tied_embeddings else _IGNORED
        check_weights(source, expected_tensors(config), ignored)
        self.config = config
        self._dtype = dtype
        self._attention = attention
        with torch.inference_mode():
            self._inv_freq = inverse_frequencies(config.rope, config.head_dim, source.rope_factors())
            embedding = source.read("model.embed_tokens.weight", dtype)
            self._embedding = make_embedding(embedding, kind, tied=config.tied_embeddings)
            del embedding
            self._layers = list(self._read_layers(source, kind))
            self._norm = RMSNorm(source.read("model.norm.weight", dtype), config.norm_eps)
            self._head: Callable[[Tensor], Tensor] = (
                self._embedding.logits
                if config.tied_embeddings
                else make_linear(source.read("lm_head.weight", dtype), kind)
            )

    def _read_layers(self, source: WeightSource, kind: LinearKind) -> Iterator[LlamaLayer]:
        for index in range(self.config.layers):
            yield LlamaLayer(index, self.config, source, self._dtype, kind)

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """One group of full attention over all layers, in the model's dtype."""
        return (
            KVGroup(
                name="full",
                layers=self.config.layers,
                kv_heads=self.config.kv_heads,
                head_dim=self.config.head_dim,
                dtype=str(self._dtype).removeprefix("torch."),
            ),
        )

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, kv: KVMemory, batch: AttentionBatch) -> Tensor:
        """See ``Model.forward``."""
        attention = self._attention.begin(kv, batch)
        phases = phases_at(positions, self._inv_freq)
        x = self._embedding.rows(token_ids)
        for layer in self._layers:
            x = layer.forward(x, phases, attention)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Model.logits``."""
        return self._head(self._norm(hidden)).to(torch.float32)
