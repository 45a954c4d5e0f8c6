"""What the products compute, in plain torch; weights are [out_features, in_features]."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T: [rows, in] -> [rows, out]."""
    return torch.nn.functional.linear(x, weight)


def add_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Add x W^T to ``out`` [rows, out]."""
    out += linear(x, weight)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T): [rows, in] -> [rows, out]."""
    return torch.nn.functional.silu(linear(x, gate)) * linear(x, up)


def rows(weight: Tensor, indices: Tensor) -> Tensor:
    """Rows of a weight: int64 [n] -> [n, in]."""
    return weight[indices]
