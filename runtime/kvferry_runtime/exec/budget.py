"""How many tokens one step may compute, so that a step on a CPU stays short."""

from collections.abc import Set

import torch

from kvferry_runtime.layers.linear import cpu_flags
from kvferry_runtime.model.config import ModelConfig

STEP_S = 0.5
# Float32 matrix products of one core of a server; a conservative figure, so that a step is rather shorter.
_FLOPS_PER_THREAD = {"avx512f": 100e9, "": 50e9}
_LEAST, _MOST, _MULTIPLE = 32, 2048, 32


def weights_per_token(config: ModelConfig) -> int:
    """Weights of the decoder's linear layers: each is used once per token, one multiplication and one addition."""
    attention = config.hidden_size * config.head_dim * 2 * (config.heads + config.kv_heads)
    return config.layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def default_token_budget(config: ModelConfig, threads: int | None = None, flags: Set[str] | None = None) -> int:
    """The largest multiple of 32 (32 to 2048) that `threads` compute within half a second.

    A thread is taken to do 50 GFLOP/s, or 100 where the CPU has AVX-512.

    Args:
        threads: torch's own number when left out.
        flags: of the CPU, as Linux names them; this machine's when left out.
    """
    used = torch.get_num_threads() if threads is None else threads
    has = cpu_flags() if flags is None else flags
    rate = _FLOPS_PER_THREAD["avx512f" if "avx512f" in has else ""]
    tokens = int(STEP_S * used * rate / (2 * weights_per_token(config)))
    return min(_MOST, max(_LEAST, tokens // _MULTIPLE * _MULTIPLE))
