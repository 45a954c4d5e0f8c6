"""What the norm computes, in plain torch."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension: [rows, width] -> the same shape."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
