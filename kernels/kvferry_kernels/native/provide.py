"""Gets the library: prebuilt, from the cache, or compiled; or says why there is none."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kvferry_kernels.native import cache
from kvferry_kernels.native.compiler import BUILD_S, BuildError, Compiler, check, native_flags
from kvferry_kernels.native.levels import PREBUILT, cpu_flags, prebuilt_path
from kvferry_kernels.native.library import NativeLibrary

WAIT_S = 120.0  # for another process that builds


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
