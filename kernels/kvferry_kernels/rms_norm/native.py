"""The norm in C++."""

import torch
from torch import Tensor

from kvferry_kernels.native.arguments import floats
from kvferry_kernels.native.library import NativeLibrary


def rms_norm(library: NativeLibrary, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: float32 [rows, width] -> the same shape."""
    scale = floats("weight", weight, (None,))
    given = floats("x", x.contiguous(), (None, scale.shape[0]))
    out = torch.empty_like(given)
    library.c.kvf_rms_norm(
        library.threads(), given.data_ptr(), scale.data_ptr(), given.shape[0], given.shape[1], eps, out.data_ptr()
    )
    return out
