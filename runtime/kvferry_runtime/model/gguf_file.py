"""The header of a GGUF file, read strictly: every count, length and offset is checked against the file's size before
anything is allocated for it. Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. No torch.
"""

import itertools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvferry_runtime.model.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 65_536
_MAX_TENSORS = 65_536
# Of all that precedes the data, and of all arrays in it: many times what a vocabulary of half a million tokens takes.
_MAX_HEADER = 64 * 2**20
_MAX_ENTRIES = 2**22
_MAX_DIMS = 4
_MAX_KEY_BYTES = 65_535
_DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GGUFTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]  # rows first: the reverse of the order in the file
    type: GGMLQuantizationType
    offset: int  # from the start of the file
    nbytes: int


class GGUFFile(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file's metadata and where its tensors lie."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    header_bytes: int  # metadata and tensor infos: all that precedes the data


def read_gguf(path: Path) -> GGUFFile:
    """Read a file's header.

    Raises:
        ModelError: not a GGUF file, of an unknown version, truncated, or with a header that cannot be true.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size < 24:
                raise ModelError(f"{path}: {size} bytes are too few for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).read()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader:
    """A cursor over the mapped file that never passes its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._at = 0
        self._entries = 0  # of arrays so far

    def read(self) -> GGUFFile:
        if self._take(4, "magic") != _MAGIC:
            raise ModelError(f"{self._path}: does not start with {_MAGIC.decode()}: not a GGUF file")
        version = self._number("<I", "version")
        if version not in _VERSIONS:
            raise ModelError(f"{self._path}: GGUF version {version}; {_VERSIONS} are accepted, little-endian")
        tensor_count = self._count("tensor_count", _MAX_TENSORS)
        key_count = self._count("kv_count", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string("a metadata key", _MAX_KEY_BYTES)
            if key in metadata:
                raise ModelError(f"{self._path}: metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number("<I", key), key)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self._path}: general.alignment is {alignment!r}; a power of two is accepted")
        infos = [self._tensor_info() for _ in range(tensor_count)]
        start = -(-self._at // alignment) * alignment
        return GGUFFile(
            path=self._path,
            metadata=metadata,
            tensors=self._placed(infos, start, alignment),
            header_bytes=self._at,
        )

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string("a tensor's name", _MAX_KEY_BYTES)
        dims = self._number("<I", name)
        if not 1 <= dims <= _MAX_DIMS:
            raise ModelError(f"{self._path}: tensor {name}: {dims} dimensions; 1..{_MAX_DIMS} are accepted")
        shape = tuple(reversed([self._number("<Q", name) for _ in range(dims)]))
        raw_type = self._number("<I", name)
        try:
            kind = GGMLQuantizationType(raw_type)
        except ValueError:
            raise ModelError(f"{self._path}: tensor {name}: unknown type {raw_type}") from None
        return name, shape, kind, self._number("<Q", name)

    def _placed(
        self, infos: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        """Turn relative offsets into absolute ones; no tensor may leave the file or lie on another."""
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise ModelError(f"{self._path}: tensor {name} appears twice")
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
            if min(shape) < 1 or shape[-1] % per_block:
                raise ModelError(
                    f"{self._path}: tensor {name}: shape {list(shape)}; {kind.name} needs sizes of at least 1 and a "
                    f"last one that is a multiple of {per_block}"
                )
            nbytes = math.prod(shape) // per_block * block_bytes
            if offset % alignment:
                raise ModelError(f"{self._path}: tensor {name}: offset {offset} is no multiple of {alignment}")
            if start + offset + nbytes > self._size:
                raise ModelError(
                    f"{self._path}: tensor {name}: {nbytes} bytes at {start + offset}, but the file has only "
                    f"{self._size}: truncated, or its header is wrong"
                )
            tensors[name] = GGUFTensor(name=name, shape=shape, type=kind, offset=start + offset, nbytes=nbytes)
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                raise ModelError(f"{self._path}: tensors {before.name} and {after.name} overlap")
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key, self._size)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ModelError(f"{self._path}: metadata {key}: unknown value type {kind}")
        return self._number(_SCALARS[kind], key)

    def _array(self, key: str) -> list[Any]:
        kind = self._number("<I", key)
        count = self._number("<Q", key)
        smallest = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind]) if kind in _SCALARS else 0
        if not smallest:
            raise ModelError(f"{self._path}: metadata {key}: arrays of value type {kind} are not accepted")
        if count * smallest > self._size - self._at:
            raise ModelError(f"{self._path}: metadata {key}: an array of {count} entries does not fit into the file")
        self._entries += count
        if self._entries > _MAX_ENTRIES:
            raise ModelError(f"{self._path}: metadata {key}: {self._entries} entries of arrays; {_MAX_ENTRIES} at most")
        if kind == _STRING:
            return [self._string(key, self._size) for _ in range(count)]
        code = _SCALARS[kind][1]
        return list(struct.unpack(f"<{count}{code}", self._take(count * smallest, key)))

    def _count(self, what: str, most: int) -> int:
        count: int = self._number("<Q", what)
        if count > most:
            raise ModelError(f"{self._path}: {what} is {count}; at most {most} are accepted")
        return count

    def _string(self, what: str, most: int) -> str:
        length = self._number("<Q", what)
        if length > most:
            raise ModelError(f"{self._path}: {what}: a string of {length} bytes; at most {most} are accepted")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path}: {what}: not UTF-8: {error}") from error

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code), what))[0]

    def _take(self, length: int, what: str) -> bytes:
        if length > self._size - self._at:
            raise ModelError(f"{self._path}: ends inside {what} (byte {self._at}): truncated, or its header is wrong")
        if self._at + length > _MAX_HEADER:
            raise ModelError(f"{self._path}: {what}: the header is longer than {_MAX_HEADER} bytes, which are accepted")
        taken = self._data[self._at : self._at + length]
        self._at += length
        return taken
