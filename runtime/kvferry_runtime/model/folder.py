"""What a model's files hold, found and checked before any weight is read. No torch.

A model is a folder as Hugging Face lays it out (``config.json``, safetensors, tokenizer files), a ``.gguf`` file, a
folder with exactly one ``.gguf`` file, or the toy model by its name. Pickled weights are refused.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.config_gguf import parse_gguf_config
from kvferry_runtime.model.config_hf import parse_hf_config
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.gguf_file import GGUFFile, read_gguf
from kvferry_runtime.model.safetensors_file import SafetensorsHeader, StoredTensor, read_header, read_index
from kvferry_runtime.model.small_files import read_small
from kvferry_runtime.model.toy_spec import ToySpec, is_toy_name, parse_toy_name
from kvferry_wire.limits import DEFAULT_LIMITS

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_JSON_BYTES = 4 * 2**20
_SAMPLES = 64
_SAMPLE_BYTES = 4096


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A model's files, headers read and checked."""

    kind: Literal["safetensors", "gguf", "toy"]
    path: Path  # the folder, or the .gguf file; of no meaning for the toy
    config: ModelConfig
    digest: str  # SHA-256 hex over config, tokenizer and weights index, and a sample of the weights
    tensors: dict[str, StoredTensor] = {}  # safetensors
    gguf: GGUFFile | None = None
    toy: ToySpec | None = None


def open_folder(source: str | Path) -> ModelFolder:
    """Find out what ``source`` holds.

    Raises:
        ModelError: nothing there, a format that is not accepted, or files that are damaged or not supported.
    """
    name = str(source)
    if is_toy_name(name):
        spec = parse_toy_name(name)
        digest = hashlib.sha256(b"toy" + msgspec.json.encode(spec)).hexdigest()
        return ModelFolder(kind="toy", path=Path(), config=spec.model_config(), digest=digest, toy=spec)
    path = Path(source).expanduser()
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise ModelError(
            f"model {name!r}: no such file or folder; accepted: a model folder, a .gguf file, or toy[:...] "
            "('kvferry model fetch NAME' gets one)"
        )
    ggufs = sorted(path.glob("*.gguf"))
    if (path / CONFIG_FILE).is_file() and ((path / WEIGHTS_FILE).is_file() or (path / INDEX_FILE).is_file()):
        return _open_safetensors(path)
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    raise ModelError(f"{path}: {_why_no_model(path, ggufs)}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 4 MiB. Raises ``ModelError`` naming the file."""
    try:
        parsed = json.loads(read_small(path, _JSON_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: no JSON object")
    return parsed


def pickle_reason(path: Path) -> str:
    """Why a file is taken for pickled weights; empty when it is not."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        head = b""
    if head == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return "holds pickled weights, which can run code when read; accepted: safetensors, gguf"
    if path.suffix in _PICKLE_SUFFIXES:
        return (
            f"*{path.suffix} is a format of pickled weights, which can run code when read; accepted: safetensors, gguf"
        )
    return ""


def _open_file(path: Path) -> ModelFolder:
    reason = pickle_reason(path)
    if reason:
        raise ModelError(f"{path}: {reason}")
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: accepted: a .gguf file, or the folder of a safetensors model")
    return _open_gguf(path)


def _open_gguf(path: Path) -> ModelFolder:
    reason = pickle_reason(path)
    if reason:
        raise ModelError(f"{path}: {reason}")
    file = read_gguf(path)
    state = hashlib.sha256(b"gguf")
    with path.open("rb") as data:
        _hash_part(state, data.read(file.header_bytes))
    _hash_sample(state, [path])
    return ModelFolder(kind="gguf", path=path, config=parse_gguf_config(file), digest=state.hexdigest(), gguf=file)


def _open_safetensors(path: Path) -> ModelFolder:
    config = parse_hf_config(read_json(path / CONFIG_FILE), str(path / CONFIG_FILE))
    if (path / WEIGHTS_FILE).is_file():
        files = [path / WEIGHTS_FILE]
        index: Mapping[str, str] | None = None
    else:
        index = read_index(path / INDEX_FILE)
        files = [path / name for name in sorted(set(index.values()))]
    headers = {file: _read_header(file) for file in files}
    tensors = _merged(path, headers, index)
    state = hashlib.sha256(b"safetensors")
    tokenizer = path / TOKENIZER_FILE
    _hash_part(state, read_small(path / CONFIG_FILE, _JSON_BYTES))
    _hash_part(state, read_small(tokenizer, DEFAULT_LIMITS.text_bundle_bytes) if tokenizer.is_file() else b"")
    for header in headers.values():
        _hash_part(state, header.raw)
    _hash_sample(state, files)
    return ModelFolder(kind="safetensors", path=path, config=config, digest=state.hexdigest(), tensors=tensors)


def _read_header(file: Path) -> SafetensorsHeader:
    if not file.is_file():
        raise ModelError(f"{file}: named by {INDEX_FILE}, but not there")
    try:
        return read_header(file)
    except ModelError as error:
        # Only now: the length of a true header may begin with the bytes of a pickle.
        reason = pickle_reason(file)
        if reason:
            raise ModelError(f"{file}: {reason}") from error
        raise


def _merged(
    path: Path, headers: Mapping[Path, SafetensorsHeader], index: Mapping[str, str] | None
) -> dict[str, StoredTensor]:
    """All files' tensors; each name once, and where an index is given, in the file that it names."""
    tensors: dict[str, StoredTensor] = {}
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelError(f"{path}: tensor {name} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = tensor
    for name, file_name in (index or {}).items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ModelError(f"{path / INDEX_FILE}: tensor {name} is not in {file_name}")
    return tensors


def _why_no_model(path: Path, ggufs: list[Path]) -> str:
    if len(ggufs) > 1:
        return f"several .gguf files; name one of them: {', '.join(file.name for file in ggufs)}"
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickles:
        return f"{pickles[0]} holds pickled weights, which can run code when read; accepted: safetensors, gguf"
    if (path / CONFIG_FILE).is_file():
        return f"{CONFIG_FILE} is there, but neither {WEIGHTS_FILE} nor {INDEX_FILE}"
    return f"no model: {CONFIG_FILE} with {WEIGHTS_FILE} (or {INDEX_FILE}), or one .gguf file, is accepted"


def _hash_part(state: "hashlib._Hash", content: bytes) -> None:
    state.update(len(content).to_bytes(8, "little"))
    state.update(content)


def _hash_sample(state: "hashlib._Hash", files: Iterable[Path]) -> None:
    """Size and evenly spread pieces of each file: tells fine-tunes with equal headers apart, without reading all."""
    for path in files:
        size = path.stat().st_size
        state.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for step in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * step // (_SAMPLES - 1))
                state.update(file.read(_SAMPLE_BYTES))
