"""The Llama decoder (arXiv:2302.13971, with grouped queries), inference only, over flattened tokens.

Nothing of a sequence is kept here; all of it lies in KV.
"""

import torch
from torch import Tensor

from kvferry_runtime.attention.backend import AttentionBackend, AttentionBatch
from kvferry_runtime.attention.native_backend import NativeAttention
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.layers.kernels import TORCH_KERNELS, Kernels
from kvferry_runtime.layers.linear import LinearKind
from kvferry_runtime.layers.rope import inverse_frequencies, phases_at
from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.llama_decoders import Decoder, FusedDecoder, LayeredDecoder
from kvferry_runtime.model.llama_weights import LlamaWeights
from kvferry_runtime.model.weights import WeightSource
from kvferry_wire.layout import KVGroup


class LlamaModel:
    """A Llama model of one checkpoint. See ``Model``.

    Args:
        source: open weights; read layer by layer, each given up once it is in the form of ``kind``.
        dtype: float32 or bfloat16, of weights, activations and KV.
        kind: the form of the weights. With ``native`` weights and ``native`` attention a step is one call of C++.
        kernels: the operators that ``native`` stands for.

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
        kernels: Kernels = TORCH_KERNELS,
    ) -> None:
        weights = LlamaWeights(config, source, dtype)
        self.config = config
        self._dtype = dtype
        with torch.inference_mode():
            self._inv_freq = inverse_frequencies(config.rope, config.head_dim, weights.rope_factors())
            self._decoder: Decoder = (
                FusedDecoder(weights, kernels.library)
                if kernels.library is not None and kind == "native" and isinstance(attention, NativeAttention)
                else LayeredDecoder(weights, attention, kind, kernels)
            )

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
        return self._decoder.forward(token_ids, phases_at(positions, self._inv_freq), kv, batch)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Model.logits``."""
        return self._decoder.logits(hidden).to(torch.float32)
