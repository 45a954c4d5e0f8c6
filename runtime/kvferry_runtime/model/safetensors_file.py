"""Headers of safetensors files, read strictly: nothing is allocated for a tensor before its place in the file was
checked. Format: u64 little-endian header length, JSON header, tensor data without holes. No torch.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.small_files import read_small, unique_keys

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

# The format allows 100 MB. What a Llama's file needs is a thousandth of that; parsed, JSON takes many times its size.
_MAX_HEADER = 16 * 2**20
_MAX_VALUES = 2**20  # of the header, counted before it is parsed: 16 for each of 65536 tensors
_MAX_INDEX = 16 * 2**20
_MAX_DIMS = 8


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies."""

    name: str
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    file: Path
    offset: int  # from the start of the file
    nbytes: int


class SafetensorsHeader(msgspec.Struct, frozen=True, kw_only=True):
    """One file's header."""

    tensors: dict[str, StoredTensor]
    raw: bytes  # the JSON as it lies, for digests


def read_header(path: Path) -> SafetensorsHeader:
    """Read one file's header.

    Raises:
        ModelError: truncated, not safetensors, or a header that does not describe this file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise ModelError(f"{path}: {size} bytes are too few for a safetensors file")
            (length,) = struct.unpack("<Q", head)
            if length > size - 8:
                raise ModelError(
                    f"{path}: a header of {length} bytes in a file of {size}: truncated, or not a safetensors file"
                )
            if length > _MAX_HEADER:
                raise ModelError(f"{path}: a header of {length} bytes; at most {_MAX_HEADER} are accepted")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    return SafetensorsHeader(tensors=_tensors(path, raw, 8 + length, size), raw=raw)


def _tensors(path: Path, raw: bytes, start: int, size: int) -> dict[str, StoredTensor]:
    if (values := sum(raw.count(mark) for mark in (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ModelError(f"{path}: a header of {values} values; at most {_MAX_VALUES} are accepted")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is no JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, start, size) for name, entry in header.items()}
    at = start
    for tensor in sorted(tensors.values(), key=lambda item: (item.offset, item.nbytes)):
        if tensor.offset != at:
            how = "overlaps another tensor" if tensor.offset < at else "leaves a hole before it"
            raise ModelError(f"{path}: tensor {tensor.name}: its place {how}")
        at += tensor.nbytes
    if at != size:
        raise ModelError(
            f"{path}: the header describes {at} bytes, the file has {size}: truncated, or its header is wrong"
        )
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    def refuse(what: str) -> ModelError:
        return ModelError(f"{path}: tensor {name}: {what}")

    if not isinstance(entry, dict):
        raise refuse("its entry is no JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in DTYPE_BYTES:
        raise refuse(f"dtype {dtype!r}; accepted: {', '.join(DTYPE_BYTES)}")
    if not _counts(shape) or len(shape) > _MAX_DIMS:
        raise refuse(f"shape {shape!r}; a list of at most {_MAX_DIMS} sizes from 0 is accepted")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"data_offsets {offsets!r}; [begin, end] is accepted")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if nbytes != offsets[1] - offsets[0]:
        raise refuse(f"shape {shape} of {dtype} takes {nbytes} bytes, data_offsets say {offsets[1] - offsets[0]}")
    if start + offsets[1] > size:
        raise refuse(
            f"ends at byte {start + offsets[1]}, but the file has only {size}: truncated, or its header is wrong"
        )
    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), file=path, offset=start + offsets[0], nbytes=nbytes)


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def read_index(path: Path) -> Mapping[str, str]:
    """Read ``model.safetensors.index.json``: tensor name -> file name in the same folder.

    Raises:
        ModelError: too large, not JSON, no ``weight_map``, or a file name that leaves the folder.
    """
    try:
        parsed = json.loads(read_small(path, _MAX_INDEX).decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    names = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{path}: weight_map: a non-empty object of tensor name to file name is needed")
    for tensor, file in names.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file
        if not plain or "\0" in file:
            raise ModelError(
                f"{path}: weight_map[{tensor!r}] is {file!r}; a *.safetensors name in this folder is accepted"
            )
    return names
