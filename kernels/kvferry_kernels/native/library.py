"""The loaded library: C functions with their types, and the threads they compute with."""

import ctypes
from pathlib import Path

import torch

from kvferry_kernels.native import openmp, structs

INTERFACE = 1  # of kernels.cpp, kvf_interface

_INT, _INT32, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_float

# name: (result, arguments); structs go by pointer.
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "kvf_interface": (_INT32, ()),
    "kvf_lanes": (_INT32, ()),
    "kvf_max_dim": (_INT32, ()),
    "kvf_packed_floats": (_INT, (_INT, _INT)),
    "kvf_pack": (None, (_POINTER, _INT, _INT, _POINTER)),
    "kvf_rows": (_INT32, (_POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER)),
    "kvf_linear": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _INT32)),
    "kvf_gated_linear": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER)),
    "kvf_rms_norm": (None, (_POINTER, _POINTER, _POINTER, _INT, _INT, _FLOAT, _POINTER)),
    "kvf_rope_write": (_INT32, (_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)),
    "kvf_write": (_INT32, (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER)),
    "kvf_attend": (_INT32, (_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER)),
    "kvf_work_floats": (_INT, (_POINTER,)),
    "kvf_forward": (_INT32, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
}


class NativeLibrary:
    """A library file in this process. Its functions are attributes of ``c``; none of them holds the GIL.

    Raises:
        OSError: the file cannot be loaded.
        ValueError: it is another version's.
    """

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        try:
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(self.c, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise ValueError(f"{path.name}: {error}") from error
        found = self.c.kvf_interface()
        if found != INTERFACE:
            raise ValueError(f"{path.name}: interface {found}; {INTERFACE} is accepted")
        self.lanes: int = self.c.kvf_lanes()
        self.max_dim: int = self.c.kvf_max_dim()
        self._entry = openmp.entry_points()
        self._threads = structs.Threads(*(self._entry or (None, None, None)), 1)
        self._pointer = ctypes.pointer(self._threads)

    def packed_floats(self, out_features: int, in_features: int) -> int:
        """Floats of a packed weight."""
        return int(self.c.kvf_packed_floats(out_features, in_features))

    def threads(self) -> "ctypes._Pointer[structs.Threads]":
        """As many threads as torch is set to use, of the pool that torch uses."""
        self._threads.count = torch.get_num_threads() if self._entry is not None else 1
        return self._pointer

    def describe(self) -> str:
        """What the start-up line says of it."""
        shared = "torch's threads" if self._entry is not None else "one thread: torch's OpenMP runtime was not found"
        return f"vectors of {self.lanes} floats, {shared}"
