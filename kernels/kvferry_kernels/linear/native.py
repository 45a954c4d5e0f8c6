"""The products with packed weights, in C++."""

import torch
from torch import Tensor

from kvferry_kernels.native.arguments import floats, integers
from kvferry_kernels.native.library import NativeLibrary


class PackedWeight:
    """A weight in the panels that the products read.

    Args:
        weight: float32 [out, in]; copied, so the caller may give it up.
        into: float32 of ``library.packed_floats(out, in)`` elements to pack into; left out, memory of its own.
    """

    def __init__(self, library: NativeLibrary, weight: Tensor, into: Tensor | None = None) -> None:
        given = floats("weight", weight.contiguous(), (None, None))
        self.out_features, self.in_features = weight.shape
        count = library.packed_floats(self.out_features, self.in_features)
        self.data = torch.empty(count) if into is None else floats("into", into, (count,))
        library.c.kvf_pack(given.data_ptr(), self.out_features, self.in_features, self.data.data_ptr())

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes, padding included."""
        return self.data.nbytes


def linear(library: NativeLibrary, x: Tensor, weight: PackedWeight) -> Tensor:
    """x W^T: float32 [rows, in] -> [rows, out]."""
    given = floats("x", x.contiguous(), (None, weight.in_features))
    out = torch.empty((given.shape[0], weight.out_features))
    _multiply(library, given, weight, out, add=False)
    return out


def add_linear(library: NativeLibrary, x: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """Add x W^T to ``out``, float32 [rows, out], contiguous."""
    given = floats("x", x.contiguous(), (None, weight.in_features))
    _multiply(library, given, weight, floats("out", out, (given.shape[0], weight.out_features)), add=True)


def gated_linear(library: NativeLibrary, x: Tensor, gate: PackedWeight, up: PackedWeight) -> Tensor:
    """silu(x G^T) * (x U^T): float32 [rows, in] -> [rows, out]."""
    if (gate.out_features, gate.in_features) != (up.out_features, up.in_features):
        raise ValueError("gate and up: weights of one shape are accepted")
    given = floats("x", x.contiguous(), (None, gate.in_features))
    out = torch.empty((given.shape[0], gate.out_features))
    library.c.kvf_gated_linear(
        library.threads(),
        given.data_ptr(),
        given.shape[0],
        gate.in_features,
        gate.data.data_ptr(),
        up.data.data_ptr(),
        gate.out_features,
        out.data_ptr(),
    )
    return out


def rows(library: NativeLibrary, weight: PackedWeight, indices: Tensor) -> Tensor:
    """Rows of a weight: int64 [n] -> float32 [n, in]. Raises ``ValueError`` for an index outside of it."""
    given = integers("indices", indices, (None,))
    out = torch.empty((given.shape[0], weight.in_features))
    status = library.c.kvf_rows(
        library.threads(),
        weight.data.data_ptr(),
        weight.out_features,
        weight.in_features,
        given.data_ptr(),
        given.shape[0],
        out.data_ptr(),
    )
    if status:
        raise ValueError(f"indices: one is outside of 0..{weight.out_features - 1}")
    return out


def _multiply(library: NativeLibrary, x: Tensor, weight: PackedWeight, out: Tensor, *, add: bool) -> None:
    library.c.kvf_linear(
        library.threads(),
        x.data_ptr(),
        x.shape[0],
        weight.in_features,
        weight.data.data_ptr(),
        weight.out_features,
        out.data_ptr(),
        int(add),
    )
