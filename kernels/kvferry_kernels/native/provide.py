"""Gets the library: prebuilt, from the cache, or compiled; or says why there is none."""

import platform
import tempfile
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from kvferry_kernels.native import cache
from kvferry_kernels.native.compiler import BuildError, Compiler, check, cpu_identity, native_flags, sources_digest
from kvferry_kernels.native.library import NativeLibrary

PREBUILT = Path(__file__).parent / "prebuilt"
BUILD_S = 90.0  # for the compiler; it takes 4 s on an idle core
WAIT_S = 120.0  # for another process that builds

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
# Levels of x86-64, best first, and the CPU flags that Linux shows for them.
LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
}


@dataclass(frozen=True, slots=True)
class Provided:
    """The library, or why there is none."""

    library: NativeLibrary | None
    reason: str  # where it comes from, or why it is not there


def open_library() -> Provided:
    """Load the library for this machine. Builds it where there is none yet; never raises for want of one."""
    path = prebuilt_path(PREBUILT, cpu_flags())
    try:
        if path is not None:
            library = NativeLibrary(path)
            return Provided(library, f"built with this package for {path.name.split('_')[0]}, {library.describe()}")
        return _built_here()
    except BuildError as error:
        return Provided(None, str(error))
    except (OSError, ValueError) as error:
        return Provided(None, f"the library cannot be loaded: {error}")


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


def _built_here() -> Provided:
    compiler, machine = Compiler.find(), native_flags()
    key = compiler.key(machine)
    folder, not_kept = _cache()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="kvferry-kernels-") as scratch:  # mode 0700
            library, took = _compile(compiler, machine, Path(scratch))
            loaded = NativeLibrary(library)  # stays mapped when the file goes
        return Provided(loaded, f"built in {took:.0f} s by {compiler.version} and not kept ({not_kept})")
    found = cache.find(folder, key)
    if found is None:
        with cache.locked(folder, WAIT_S):
            found = cache.find(folder, key)
            if found is None:
                with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
                    library, took = _compile(compiler, machine, Path(scratch))
                    loaded = NativeLibrary(cache.install(folder, library, key))
                return Provided(loaded, f"built in {took:.0f} s by {compiler.version}, {loaded.describe()}")
    loaded = NativeLibrary(found)
    return Provided(loaded, f"built before for this CPU, {loaded.describe()}")


def _cache() -> tuple[Path | None, str]:
    """The cache's folder, or why it cannot be used."""
    try:
        folder = cache.cache_folder()
        cache.open_folder(folder)
    except BuildError as error:
        return None, str(error)
    return folder, ""


def _compile(compiler: Compiler, machine: tuple[str, ...], scratch: Path) -> tuple[Path, float]:
    started = time.monotonic()
    library = scratch / "kernels.so"
    compiler.compile(machine, library, BUILD_S)
    check(library)
    return library, time.monotonic() - started
