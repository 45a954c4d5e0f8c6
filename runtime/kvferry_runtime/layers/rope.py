"""Rotary position embedding (arXiv:2104.09864) in the interleaved form: dimensions 2 i and 2 i + 1 turn together."""

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


def phases_at(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """exp(i angle) of a step's positions (int64 [T]): complex64 [T, 1, head_dim / 2], shared by all layers."""
    angles = torch.outer(positions.to(torch.float32), inv_freq)
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """Rotate interleaved [T, heads, head_dim] by ``phases_at``: one complex product."""
    pairs = torch.view_as_complex(x.to(torch.float32).unflatten(-1, (-1, 2)))  # type: ignore[no-untyped-call]  # torch's gap
    return torch.view_as_real(pairs * phases).flatten(-2).to(x.dtype)


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a checkpoint's query or key projection [heads * head_dim, n] for ``rotate``.

    Checkpoints are half-split: row i of a head turns with row i + head_dim / 2. Here they become rows 2 i and 2 i + 1.
    Queries and keys are reordered alike, so that their products stay the same.
    """
    halves = weight.view(heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)
