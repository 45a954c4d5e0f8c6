"""From a model's name or path to a model that computes."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kvferry_runtime.attention.backend import make_backend
from kvferry_runtime.layers.kernels import TORCH_KERNELS, Kernels, choose_kernels
from kvferry_runtime.layers.linear import choose_linear, cpu_flags
from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.folder import ModelFolder, open_folder
from kvferry_runtime.model.interface import Model
from kvferry_runtime.model.llama import LlamaModel
from kvferry_runtime.model.toy import ToyModel
from kvferry_runtime.model.weights import WeightSource
from kvferry_runtime.model.weights_gguf import GGUFWeights
from kvferry_runtime.model.weights_safetensors import SafetensorsWeights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FAST_BF16_FLAGS = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what the start-up line says of it."""

    model: Model
    config: ModelConfig
    folder: ModelFolder  # its files; `folder.digest` names the model in the compat hash
    dtype: str  # of weights and KV: "float32" or "bfloat16"; "int64" for the toy
    attention: str  # name of the attention back end; "" for the toy
    reasons: tuple[str, ...]  # why this dtype, these operators, this form of weights and this attention back end
    kernels: Kernels = TORCH_KERNELS  # whose operators compute


def load_model(source: str | Path | ModelFolder, dtype: str = "auto", *, attention: str = "auto") -> LoadedModel:
    """Load a model.

    Args:
        source: a model folder, a ``.gguf`` file, ``toy[:...]``, or what ``open_folder`` made of it.
        dtype: "auto", "float32" or "bfloat16". The toy computes in int64, whatever is asked.
        attention: name of an attention back end, or "auto".

    Raises:
        ModelError: unknown, damaged or unsupported; nothing large has been allocated when the files are at fault.
    """
    folder = source if isinstance(source, ModelFolder) else open_folder(source)
    if folder.toy is not None:
        toy = ToyModel(folder.toy)
        return LoadedModel(
            model=toy,
            config=toy.config,
            folder=folder,
            dtype="int64",
            attention="",
            reasons=("dtype int64: the toy model",),
        )
    name, dtype_reason = choose_dtype(dtype)
    try:
        kernels = choose_kernels(_DTYPES[name])
        kind, linear_reason = choose_linear("cpu", _DTYPES[name], kernels)
        backend_name, backend = make_backend(folder.config, torch.device("cpu"), _DTYPES[name], attention, kernels)
    except ValueError as error:
        raise ModelError(str(error)) from error
    weights: WeightSource = (
        GGUFWeights(folder.gguf, folder.config)
        if folder.gguf is not None
        else SafetensorsWeights(folder.path, folder.tensors)
    )
    model = LlamaModel(folder.config, weights, dtype=_DTYPES[name], kind=kind, attention=backend, kernels=kernels)
    return LoadedModel(
        model=model,
        config=folder.config,
        folder=folder,
        dtype=name,
        attention=backend_name,
        reasons=(
            dtype_reason,
            f"operators {kernels.name}: {kernels.reason}",
            f"weights {kind}: {linear_reason}",
            f"attention {backend_name}",
        ),
        kernels=kernels,
    )


def choose_dtype(asked: str) -> tuple[str, str]:
    """The dtype to compute in on this CPU, and why. Raises ``ModelError`` for another name."""
    if asked in _DTYPES:
        return asked, f"dtype {asked}: asked for"
    if asked != "auto":
        raise ModelError(f"dtype: {asked!r} given; accepted: auto, {', '.join(_DTYPES)}")
    fast = [flag for flag in _FAST_BF16_FLAGS if flag in cpu_flags()]
    if fast:
        return "bfloat16", f"dtype bfloat16: this CPU has {' and '.join(fast)}"
    return "float32", f"dtype float32: this CPU has none of {', '.join(_FAST_BF16_FLAGS)}"
