"""What a decoder computes, as numbers. No torch.

``config_hf`` and ``config_gguf`` read it from a Hugging Face ``config.json`` and from GGUF metadata.
"""

from typing import Literal

import msgspec

RopeType = Literal["default", "linear", "llama3"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. The scaling fields mean what transformers' ``rope_parameters`` mean."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0  # linear, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder. Sizes are element counts."""

    architecture: Literal["llama", "toy"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_model_len: int  # positions the model was made for
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    dtype: str  # of the checkpoint, as far as it says: "float32", "bfloat16", "float16", "quantized", "int64"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
