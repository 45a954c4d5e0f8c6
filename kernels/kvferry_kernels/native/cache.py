"""Libraries that were built for this user and this machine.

What lies here is loaded into the engine, so whoever can write it can run code there. Hence: the folder is the user's
own with mode 0700, everything above it can be changed by the user or root alone, and a file that is not the user's is
not used. A library appears whole (renamed into place) and is built by one process at a time.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvferry_kernels.native.compiler import BuildError

_KEPT = 8  # libraries; more are there only after upgrades of compiler or sources
_POLL_S = 0.1


def cache_folder() -> Path:
    """``$KVFERRY_CACHE/kernels``, else ``~/.cache/kvferry/kernels``. Raises ``BuildError`` where there is no home."""
    given = os.environ.get("KVFERRY_CACHE")
    try:
        root = Path(given).expanduser() if given else Path.home() / ".cache" / "kvferry"
    except RuntimeError as error:
        raise BuildError("no home folder and no KVFERRY_CACHE") from error
    return root.absolute() / "kernels"


def open_folder(folder: Path) -> None:
    """Make the folder where it is not there, and check that it is private.

    Raises:
        BuildError: it cannot be made or written, or others can change it; the message says which.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise BuildError(f"{folder}: not a folder of this user with mode 0700")
    for parent in folder.resolve().parents:
        found = parent.stat()
        shared = stat.S_IMODE(found.st_mode) & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or shared:
            raise BuildError(f"{folder}: {parent} can be changed by others")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BuildError(f"{folder}: cannot be written")


def find(folder: Path, key: str) -> Path | None:
    """The library of this key, or ``None``. Raises ``BuildError`` for a file that is not this user's alone."""
    path = folder / f"{key}.so"
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise BuildError(f"{path}: not a file of this user that no other can write")
    return path


@contextlib.contextmanager
def locked(folder: Path, timeout: float) -> Iterator[None]:
    """Only one process at a time builds. The lock ends with its process. Raises ``BuildError`` after ``timeout`` s."""
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from error
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BuildError(f"another process has been building for {timeout:.0f} s") from None
                time.sleep(_POLL_S)
            except OSError as error:
                raise BuildError(f"{folder}: no lock: {error.strerror}") from error
        yield
    finally:
        os.close(handle)


def install(folder: Path, built: Path, key: str) -> Path:
    """Put a library in its place, and drop the oldest of more than a few. Raises ``BuildError``."""
    path = folder / f"{key}.so"
    try:
        built.chmod(0o600)
        built.replace(path)
        others = sorted(folder.glob("*.so"), key=lambda item: item.stat().st_mtime, reverse=True)
        for old in [item for item in others if item != path][_KEPT - 1 :]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    return path
