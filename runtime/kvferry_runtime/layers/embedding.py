"""The token embedding, and the output layer where it shares the embedding's weight (tied).

A small tied weight is kept twice, as rows to read and in oneDNN's packed form to multiply with: the product with all
tokens is a fifth of a small model's step. A large one is kept once, in the form that multiplies fastest:
``transposed`` keeps [panels, hidden, columns], in which a token is a column, so that reading one token costs a strided
copy of ``hidden`` values. So does ``native``, whatever the size: its products are no faster with a second copy.
"""

from typing import Protocol

import torch
from torch import Tensor

from kvferry_kernels.linear import native
from kvferry_kernels.native.library import NativeLibrary
from kvferry_runtime.layers.kernels import TORCH_KERNELS, Kernels
from kvferry_runtime.layers.linear import PANEL_COLUMNS, LinearKind, PackedLinear, packed_reason

# A tied weight of at most this many bytes may be kept twice; it is part of the 300 MiB that an engine process may take
# beside weights and KV (benchmarks/memory.py).
TWICE_BYTES = 128 * 2**20


class Embedding(Protocol):
    """[vocab, hidden] as rows to read and as a matrix to multiply with."""

    def rows(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden], of its own memory."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab], where the output layer is tied."""
        ...


class RowMajorEmbedding:
    """The weight [vocab, hidden] as it is."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._onednn = not packed_reason(weight.device.type, weight.dtype)

    def rows(self, token_ids: Tensor) -> Tensor:
        """See ``Embedding``."""
        return self._weight.index_select(0, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Embedding``."""
        if self._onednn and hidden.shape[0] > 1:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._weight, None, "none", [], "")
            return out
        return torch.nn.functional.linear(hidden, self._weight)


class PackedHeadEmbedding:
    """The weight [vocab, hidden] as it is, and packed."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._head = PackedLinear(weight)

    def rows(self, token_ids: Tensor) -> Tensor:
        """See ``Embedding``."""
        return self._weight.index_select(0, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Embedding``."""
        return self._head(hidden)


class TransposedEmbedding:
    """Panels of tokens, each a contiguous [hidden, columns]; the last one is padded with zeros."""

    def __init__(self, weight: Tensor) -> None:
        self._vocab, hidden = weight.shape
        self._columns = -(-self._vocab // max(1, round(self._vocab / PANEL_COLUMNS)))
        parts = torch.split(weight, self._columns)
        self._panels = weight.new_zeros((len(parts), hidden, self._columns))
        for panel, rows in zip(self._panels, parts, strict=True):
            panel[:, : rows.shape[0]] = rows.t()

    def rows(self, token_ids: Tensor) -> Tensor:
        """See ``Embedding``."""
        return self._panels[token_ids // self._columns, :, token_ids % self._columns]

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Embedding``."""
        by_panel = torch.matmul(hidden, self._panels)  # [panels, R, columns]
        return by_panel.transpose(0, 1).reshape(hidden.shape[0], -1)[:, : self._vocab]


class NativeEmbedding:
    """Panels of our own C++ operators, for both."""

    def __init__(self, weight: Tensor, library: NativeLibrary) -> None:
        self._library = library
        self._weight = native.PackedWeight(library, weight)

    def rows(self, token_ids: Tensor) -> Tensor:
        """See ``Embedding``."""
        return native.rows(self._library, self._weight, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Embedding``."""
        return native.linear(self._library, hidden, self._weight)


def make_embedding(weight: Tensor, kind: LinearKind, kernels: Kernels = TORCH_KERNELS, *, tied: bool) -> Embedding:
    """An embedding that owns ``weight``. One that is only read stays row-major."""
    if kind == "native" and kernels.library is not None and tied:
        return NativeEmbedding(weight, kernels.library)
    packable = kind != "plain" and not packed_reason(weight.device.type, weight.dtype)
    if tied and packable and weight.nbytes <= TWICE_BYTES:
        return PackedHeadEmbedding(weight)
    return TransposedEmbedding(weight) if tied and kind == "transposed" else RowMajorEmbedding(weight)
