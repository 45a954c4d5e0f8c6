"""Rotary position embedding (arXiv:2104.09864) in the half-split form: dimension i turns with i + head_dim / 2."""

import math

import torch
from torch import Tensor

from kvferry_runtime.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, factors: Tensor | None = None) -> Tensor:
    """Angle per position of each pair of dimensions: float32 [head_dim / 2].

    Args:
        factors: divisors of the frequencies, [head_dim / 2], where the file gives them ready-made (GGUF).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if factors is not None:
        return plain / factors.to(torch.float32)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long waves are stretched by ``factor``, short ones kept, the ones between are blended."""
    wavelength = 2 * math.pi / plain
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > low_wavelength, plain / rope.factor, plain)
    between = (wavelength <= low_wavelength) & (wavelength >= high_wavelength)
    return torch.where(between, blended, scaled)


def angles_at(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, signed sin) of a step's positions (int64 [T]), each [T, 1, head_dim]; shared by all layers.

    The first half of a head's dimensions takes -sin of the second half, the second half +sin of the first.
    """
    angles = torch.outer(positions.to(torch.float32), inv_freq)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate [T, heads, head_dim] by the angles of ``angles_at``."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, -1), signed_sin)
