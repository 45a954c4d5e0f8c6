"""Root mean square normalization."""

import torch
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, the mean in float32 (arXiv:1910.07467)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._shape = (weight.numel(),)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return torch.nn.functional.rms_norm(x, self._shape, self._weight, self._eps)
