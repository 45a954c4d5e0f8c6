"""What the model asks of a weights file, whatever its format, and the check of names and shapes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from kvferry_runtime.model.errors import ModelError

_LISTED = 5  # names shown of a longer list


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor as the file's header tells, checked against the file's size."""

    shape: tuple[int, ...]
    dtype: str  # the format's own name, for messages
    file: str  # name of the file that holds it


class WeightSource(Protocol):
    """An open weights file; tensors have the names of a Hugging Face Llama checkpoint."""

    @property
    def path(self) -> Path:
        """The file, or the folder of several."""
        ...

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors. Reads no tensor's data."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, converted: contiguous, of its own memory."""
        ...

    def rope_factors(self) -> Tensor | None:
        """Divisors of the rotary frequencies, float32 [head_dim / 2], where the file brings them."""
        ...


def check_weights(source: WeightSource, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
    """Compare names and shapes with what the model needs, before anything large is allocated.

    Args:
        expected: shape by name.
        ignored: suffixes of names that may be there and are not read.

    Raises:
        ModelError: tensors that lack, are unknown, or have another shape; all of them in one message.
    """
    infos = source.infos()
    suffixes = tuple(ignored)
    faults: list[str] = []
    missing = [name for name in expected if name not in infos]
    unknown = [name for name in infos if name not in expected and not name.endswith(suffixes or ("\0",))]
    if missing:
        faults.append(f"{_listed(missing)}: not in the file; the model's config needs {_one(missing)}")
    if unknown:
        faults.append(f"{_listed(unknown)}: the model's config has no place for {_one(unknown)}")
    for name, shape in expected.items():
        if name in infos and infos[name].shape != shape:
            faults.append(f"{name}: shape {list(infos[name].shape)} in {infos[name].file}; {list(shape)} is accepted")
    if faults:
        shown = faults[:_LISTED] + ([f"and {len(faults) - _LISTED} more"] if len(faults) > _LISTED else [])
        raise ModelError(f"{source.path}: " + "; ".join(shown))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more tensors"


def _one(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
