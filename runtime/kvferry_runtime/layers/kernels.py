"""Which operators the engine computes with: those in C++ of ``kvferry_kernels``, or torch's; and why."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from kvferry_kernels.native.library import NativeLibrary
from kvferry_kernels.native.provide import Provided, open_library

VARIABLE = "KVFERRY_KERNELS"
CHOICES = ("auto", "native", "torch")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library of C++ operators where the engine uses it, and the reason for either."""

    library: NativeLibrary | None
    reason: str

    @property
    def name(self) -> str:
        """ "native" or "torch"."""
        return "torch" if self.library is None else "native"


TORCH_KERNELS = Kernels(None, "torch's operators were asked for")


def choose_kernels(dtype: torch.dtype, env: Mapping[str, str] | None = None) -> Kernels:
    """What ``KVFERRY_KERNELS`` asks for: ``auto`` takes the C++ operators where they can be had, ``torch`` never,
    ``native`` nothing else.

    Raises:
        ValueError: the variable holds something else, or asks for operators that cannot be had.
    """
    asked = (os.environ if env is None else env).get(VARIABLE) or "auto"
    if asked not in CHOICES:
        raise ValueError(f"{VARIABLE}: {asked[:80]!r} given; one of {', '.join(CHOICES)} is accepted")
    if asked == "torch":
        return Kernels(None, f"{VARIABLE}=torch")
    if dtype != torch.float32:
        kernels = Kernels(None, f"the C++ operators compute in float32, not {str(dtype).removeprefix('torch.')}")
    else:
        provided = _provided()
        kernels = Kernels(provided.library, provided.reason)
    if asked == "native" and kernels.library is None:
        raise ValueError(f"{VARIABLE}: native given; the C++ operators cannot be used: {kernels.reason}")
    return kernels


@cache
def _provided() -> Provided:
    return open_library()  # built at most once in a process, also where it fails
