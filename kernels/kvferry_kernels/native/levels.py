"""Libraries that were built beforehand: for which levels of x86-64, where they lie, and what they are called.

Needs no torch: an image's compiler stage (``prebuild``) has none.
"""

import platform
from collections.abc import Set
from pathlib import Path

from kvferry_kernels.native.compiler import cpu_identity, sources_digest

PREBUILT = Path(__file__).parent / "prebuilt"

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
# Levels of x86-64, best first, and the CPU flags that Linux shows for them.
LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
}


def prebuilt_path(folder: Path, flags: Set[str]) -> Path | None:
    """The best library of these sources in the folder that a CPU with these flags can run."""
    for level, needed in LEVELS.items():
        path = folder / prebuilt_name(level)
        if needed <= flags and path.is_file():
            return path
    return None


def prebuilt_name(level: str) -> str:
    """The file of a level, made of the sources that lie beside it."""
    return f"{level}_{sources_digest()[:32]}.so"


def cpu_flags() -> frozenset[str]:
    """The CPU's features as Linux names them; empty on machines other than x86-64."""
    if platform.machine() != "x86_64":
        return frozenset()
    flags = [line for line in cpu_identity().splitlines() if line.startswith("flags=")]
    return frozenset(flags[0].removeprefix("flags=").split()) if flags else frozenset()
