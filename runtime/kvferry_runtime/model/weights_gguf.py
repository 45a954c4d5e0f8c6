"""Weights of a GGUF file under Hugging Face names, dequantized tensor by tensor.

llama.cpp stores the rows of the query and key projections with each head's two halves interleaved; they are put back
into half-split order here, so that the decoder knows one form of rotary embedding.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.gguf_file import GGUFFile, GGUFTensor
from kvferry_runtime.model.weights import TensorInfo

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_ROPE_FACTORS = "rope_freqs.weight"


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a Llama tensor of a GGUF file; an unknown one keeps its name."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.weight"
    return name


class GGUFWeights:
    """See ``WeightSource``. Peak memory of a read: the tensor, and its quantized bytes."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._heads = {"q_proj": config.heads, "k_proj": config.kv_heads}
        self._half = config.head_dim // 2
        self._tensors = {hugging_face_name(name): tensor for name, tensor in file.tensors.items()}
        self._factors = self._tensors.pop(_ROPE_FACTORS, None)
        for tensor in file.tensors.values():
            if not _readable(tensor.type):
                raise ModelError(f"{file.path}: tensor {tensor.name}: type {tensor.type.name} cannot be dequantized")
        if self._factors is not None and self._factors.shape != (self._half,):
            raise ModelError(
                f"{file.path}: tensor {_ROPE_FACTORS}: shape {list(self._factors.shape)}; [{self._half}] is accepted"
            )

    @property
    def path(self) -> Path:
        """See ``WeightSource``."""
        return self._file.path

    def infos(self) -> Mapping[str, TensorInfo]:
        """See ``WeightSource``."""
        return {
            name: TensorInfo(shape=tensor.shape, dtype=tensor.type.name, file=self._file.path.name)
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """See ``WeightSource``."""
        weight = self._dequantized(self._tensors[name]).to(dtype)
        parts = name.split(".")
        heads = self._heads.get(parts[-2]) if len(parts) > 1 else None
        return weight if heads is None else self._half_split(weight, heads)

    def rope_factors(self) -> Tensor | None:
        """See ``WeightSource``."""
        return None if self._factors is None else self._dequantized(self._factors)

    def _half_split(self, weight: Tensor, heads: int) -> Tensor:
        """Undo the interleaving of [heads * head_dim, n]: row 2 i + half of a head becomes row half * dim / 2 + i."""
        rows = weight.view(heads, self._half, 2, weight.shape[-1])
        return rows.transpose(1, 2).reshape(weight.shape)

    def _dequantized(self, tensor: GGUFTensor) -> Tensor:
        raw = np.fromfile(self._file.path, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        if raw.nbytes != tensor.nbytes:
            raise ModelError(f"{self._file.path}: tensor {tensor.name}: the file ended while it was read")
        if tensor.type == GGMLQuantizationType.F32:
            values = raw.view(np.float32)
        elif tensor.type == GGMLQuantizationType.F16:
            values = raw.view(np.float16)
        else:
            rows = raw.reshape(int(np.prod(tensor.shape[:-1])), -1)
            values = quants.dequantize(rows, tensor.type)
        return torch.from_numpy(values.reshape(tensor.shape))


def _readable(kind: GGMLQuantizationType) -> bool:
    return kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16) or kind in quants._type_traits
