"""How many tokens one step may compute, so that a step on a CPU stays short."""

import torch

from kvferry_runtime.model.config import ModelConfig

STEP_S = 0.5
_FLOPS_PER_THREAD = 50e9  # float32 GEMM of a server core with AVX2; a core with AVX-512 does more
_LEAST, _MOST, _MULTIPLE = 64, 2048, 64


def weights_per_token(config: ModelConfig) -> int:
    """Weights of the decoder's linear layers: each is used once per token, one multiplication and one addition."""
    attention = config.hidden_size * config.head_dim * 2 * (config.heads + config.kv_heads)
    return config.layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def default_token_budget(config: ModelConfig, threads: int | None = None) -> int:
    """The largest multiple of 64 (64 to 2048) that `threads` compute within half a second at 50 GFLOP/s each."""
    used = torch.get_num_threads() if threads is None else threads
    tokens = int(STEP_S * used * _FLOPS_PER_THREAD / (2 * weights_per_token(config)))
    return min(_MOST, max(_LEAST, tokens // _MULTIPLE * _MULTIPLE))
