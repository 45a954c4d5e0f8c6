"""Linear layers for inference: y = x W^T without bias, the weight stored the way the machine multiplies it fastest.

A layer owns its weight in one form only; the row-major original is given up. The forms, and when each is chosen:

- ``native``: panels that our own C++ operators read. float32, where those operators are used at all.
- ``packed``: oneDNN's blocked layout. bfloat16, and float32 on CPUs where MKL is slow (all but Intel's).
- ``transposed``: W^T in panels of columns, multiplied by MKL. float32 on Intel CPUs: at 1 row as fast as ``plain``, at
  8 to 32 rows 1.3 to 1.5 times as fast; ``packed`` loses a quarter at 1 row there.
- ``plain``: row-major, ``torch.nn.functional.linear``. Everything else.

The packed form uses private operators of torch, so it is probed at run time and its absence has a reason.
"""

from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvferry_kernels.linear.native import PackedWeight, linear
from kvferry_kernels.native.library import NativeLibrary
from kvferry_runtime.layers.kernels import TORCH_KERNELS, Kernels

LinearKind = Literal["plain", "packed", "transposed", "native"]

# oneDNN chooses a blocked layout for a batch of about this many rows.
_PACK_ROWS = 32

# Columns of a panel. MKL's products of few rows slow down with wider matrices; more panels cost calls at one row.
PANEL_COLUMNS = 768


class Linear(Protocol):
    """x [T, in_features] -> [T, out_features], of the weight's dtype."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes."""
        ...


class PlainLinear:
    """The row-major weight [out_features, in_features] as it is."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return torch.nn.functional.linear(x, self._weight)

    @property
    def nbytes(self) -> int:
        """See ``Linear``."""
        return self._weight.nbytes


class TransposedLinear:
    """W^T as panels of columns, each contiguous."""

    def __init__(self, weight: Tensor) -> None:
        self._out_features = weight.shape[0]
        count = max(1, round(self._out_features / PANEL_COLUMNS))
        self._panels = [rows.t().contiguous() for rows in weight.tensor_split(count)]

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        if len(self._panels) == 1:
            return torch.mm(x, self._panels[0])
        out = x.new_empty((x.shape[0], self._out_features))
        start = 0
        for panel in self._panels:
            end = start + panel.shape[1]
            torch.mm(x, panel, out=out[:, start:end])
            start = end
        return out

    @property
    def nbytes(self) -> int:
        """See ``Linear``."""
        return sum(panel.nbytes for panel in self._panels)


class PackedLinear:
    """oneDNN's blocked layout."""

    def __init__(self, weight: Tensor) -> None:
        self._nbytes = weight.nbytes
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        out: Tensor = self._multiply(x, self._weight, None, "none", [], "")
        return out

    @property
    def nbytes(self) -> int:
        """See ``Linear``."""
        return self._nbytes


class NativeLinear:
    """Panels of our own C++ operators."""

    def __init__(self, weight: Tensor, library: NativeLibrary) -> None:
        self._library = library
        self._weight = PackedWeight(library, weight)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return linear(self._library, x, self._weight)

    @property
    def nbytes(self) -> int:
        """See ``Linear``; the padding of the last panel included."""
        return self._weight.nbytes


_TORCH_CLASSES: dict[LinearKind, type[PlainLinear] | type[TransposedLinear] | type[PackedLinear]] = {
    "plain": PlainLinear,
    "transposed": TransposedLinear,
    "packed": PackedLinear,
}


@cache
def packed_reason(device_type: str, dtype: torch.dtype) -> str:
    """Why the packed form cannot be used; empty when it can. Multiplies a small matrix to be sure."""
    if device_type != "cpu":
        return f"packed weights are for the CPU, not {device_type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"packed weights are for float32 and bfloat16, not {dtype}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's gap
        return "this torch is built without oneDNN"
    weight = torch.arange(32, dtype=dtype).view(4, 8)
    x = torch.ones((2, 8), dtype=dtype)
    try:
        with torch.inference_mode():
            same = torch.equal(PackedLinear(weight)(x), x @ weight.t())
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"this torch lacks the operators for packed weights ({type(error).__name__})"
    return "" if same else "packed weights gave a wrong product"


@cache
def choose_linear(device_type: str, dtype: torch.dtype, kernels: Kernels = TORCH_KERNELS) -> tuple[LinearKind, str]:
    """The form for a model's weights, and why."""
    if kernels.library is not None:
        return "native", "our own C++ operators"
    packed = packed_reason(device_type, dtype)
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # torch's gap
    if device_type == "cpu" and dtype == torch.float32 and has_mkl and _intel():
        return "transposed", "float32 on an Intel CPU: MKL with transposed weights"
    if not packed:
        return "packed", f"{str(dtype).removeprefix('torch.')} on this CPU: oneDNN with packed weights"
    return "plain", packed


def make_linear(weight: Tensor, kind: LinearKind, kernels: Kernels = TORCH_KERNELS) -> Linear:
    """A layer that owns ``weight`` [out_features, in_features]; the caller gives up its reference.

    Raises ``ValueError`` where ``native`` is asked for without the C++ operators.
    """
    if kind != "native":
        return _TORCH_CLASSES[kind](weight)
    if kernels.library is None:
        raise ValueError(f"native weights need the C++ operators: {kernels.reason}")
    return NativeLinear(weight, kernels.library)


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU's feature flags, lower case; empty where the system does not tell."""
    return frozenset(_cpu_field("flags").lower().split())


def _intel() -> bool:
    return _cpu_field("vendor_id") == "GenuineIntel"


@cache
def _cpu_field(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
