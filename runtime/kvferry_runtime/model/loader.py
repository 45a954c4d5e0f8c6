"""From a model's name or path to a model that computes."""

from dataclasses import dataclass

from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.interface import Model
from kvferry_runtime.model.toy import ToyModel
from kvferry_runtime.model.toy_spec import is_toy_name, parse_toy_name


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what the start-up line says of it."""

    model: Model
    config: ModelConfig
    dtype: str  # what it computes in: "float32", "bfloat16"; "int64" for the toy
    reasons: tuple[str, ...]  # why this dtype, these linears and this attention back end


def load_model(source: str, dtype: str = "auto", *, attention: str = "auto") -> LoadedModel:
    """Load a model folder, a ``.gguf`` file or ``toy[:...]``.

    Args:
        source: what ``model.folder.open_folder`` takes.
        dtype: "auto", "float32" or "bfloat16".
        attention: name of an attention back end, or "auto".

    Raises:
        ModelError: see ``model.errors``; nothing large has been allocated when the files are at fault.
    """
    if is_toy_name(source):
        model = ToyModel(parse_toy_name(source))
        return LoadedModel(model=model, config=model.config, dtype="int64", reasons=("dtype int64: the toy model",))
    raise ModelError(f"model {source!r}: not loadable yet")
