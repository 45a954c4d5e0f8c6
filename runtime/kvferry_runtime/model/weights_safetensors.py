"""Weights of safetensors files: each tensor is read into its own memory, without mapping the file."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.safetensors_file import StoredTensor
from kvferry_runtime.model.weights import TensorInfo

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsWeights:
    """See ``WeightSource``. Peak memory of a read: the tensor, and once more in its stored dtype if that differs."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self._path = path
        self._tensors = tensors

    @property
    def path(self) -> Path:
        """See ``WeightSource``."""
        return self._path

    def infos(self) -> Mapping[str, TensorInfo]:
        """See ``WeightSource``."""
        return {
            name: TensorInfo(shape=tensor.shape, dtype=tensor.dtype, file=tensor.file.name)
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """See ``WeightSource``."""
        stored = self._tensors[name]
        weight = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
        target = weight.view(-1).view(torch.uint8).numpy().data
        try:
            with stored.file.open("rb") as file:
                file.seek(stored.offset)
                got = file.readinto(target)
        except OSError as error:
            raise ModelError(f"{stored.file}: cannot be read: {error.strerror or error}") from error
        if got != stored.nbytes:
            raise ModelError(f"{stored.file}: tensor {name}: the file ended while it was read")
        return weight.to(dtype)

    def rope_factors(self) -> Tensor | None:
        """See ``WeightSource``."""
        return None
