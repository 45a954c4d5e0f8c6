"""The threads that torch computes with, for calls from C++.

A second pool on the same cores would spin against torch's. So the library has none: it enters a team through
``GOMP_parallel``, the entry point of every OpenMP runtime that torch is built with on Linux (libgomp, LLVM's, Intel's),
looked up through torch's own library so that it is the very one torch uses.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch


class EntryPoints(NamedTuple):
    """Addresses of C functions."""

    parallel: int
    thread_number: int
    team_size: int


@cache
def entry_points() -> EntryPoints | None:
    """Those of torch's OpenMP runtime; ``None`` where they are not found: then calls compute on one thread."""
    try:
        # A handle's symbols include those of the libraries it needs.
        handle = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        found = [ctypes.cast(getattr(handle, name), ctypes.c_void_p).value for name in names]
    except (OSError, AttributeError):
        return None
    parallel, thread_number, team_size = found
    if parallel is None or thread_number is None or team_size is None:
        return None
    return EntryPoints(parallel, thread_number, team_size)
