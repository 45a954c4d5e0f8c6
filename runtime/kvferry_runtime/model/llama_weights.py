"""A Llama checkpoint's tensors by what they are for."""

import torch
from torch import Tensor

from kvferry_kernels.decoder.shape import DecoderShape, LayerWeights
from kvferry_runtime.layers.rope import interleave
from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.weights import WeightSource, check_weights

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


def decoder_shape(config: ModelConfig) -> DecoderShape:
    """A config's sizes as operators take them."""
    return DecoderShape(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        dim=config.head_dim,
        inner=config.intermediate_size,
        layers=config.layers,
        eps=config.norm_eps,
    )


class LlamaWeights:
    """A checked checkpoint; each call reads its tensors anew, in ``dtype``.

    Raises:
        ModelError: a tensor that lacks, is unknown, or has another shape.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, dtype: torch.dtype) -> None:
        ignored = (*_IGNORED, "lm_head.weight") if config.tied_embeddings else _IGNORED
        check_weights(source, expected_tensors(config), ignored)
        self.config = config
        self.dtype = dtype
        self._source = source

    def rope_factors(self) -> Tensor | None:
        """See ``WeightSource.rope_factors``."""
        return self._source.rope_factors()

    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        return self._read("model.embed_tokens")

    def norm(self) -> Tensor:
        """[hidden], before the output layer."""
        return self._read("model.norm")

    def head(self) -> Tensor:
        """[vocab, hidden]; only where the embedding is not tied."""
        return self._read("lm_head")

    def layer(self, index: int) -> LayerWeights:
        """One layer, queries and keys reordered for interleaved rotation."""
        prefix = f"model.layers.{index}."
        queries = interleave(self._read(prefix + "self_attn.q_proj"), self.config.heads)
        keys = interleave(self._read(prefix + "self_attn.k_proj"), self.config.kv_heads)
        return LayerWeights(
            attention_norm=self._read(prefix + "input_layernorm"),
            qkv=torch.cat((queries, keys, self._read(prefix + "self_attn.v_proj"))),
            output=self._read(prefix + "self_attn.o_proj"),
            mlp_norm=self._read(prefix + "post_attention_layernorm"),
            gate=self._read(prefix + "mlp.gate_proj"),
            up=self._read(prefix + "mlp.up_proj"),
            down=self._read(prefix + "mlp.down_proj"),
        )

    def _read(self, name: str) -> Tensor:
        return self._source.read(f"{name}.weight", self.dtype)
