"""Where fetched models lie: one folder for each source, in it one for each version, which never changes.

``ROOT/SLUG/VERSION/`` holds a model's files and a record of them; ``ROOT/SLUG/latest`` names the version that was
fetched last; ``ROOT/SLUG/.partial/`` holds what has arrived of another.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvferry_runtime.model.fetch.checks import sha256_of
from kvferry_runtime.model.fetch.errors import FetchError
from kvferry_wire.fetch import FetchReason

RECORD_FILE = ".kvferry.json"
LATEST = "latest"
PARTIAL = ".partial"
LOCK_POLL_S = 0.5
ROOM_LEFT = 64 * 2**20  # bytes that a fetch leaves free
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file as it lay when it was verified."""

    size: int
    mtime_ns: int
    sha256: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a version holds and where it came from."""

    source: str
    commit: str | None = None
    files: dict[str, KeptFile]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def default_root() -> Path:
    """Where fetched models lie: ``$KVFERRY_MODELS``, else ``~/.cache/kvferry/models``."""
    given = os.environ.get("KVFERRY_MODELS")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "kvferry" / "models"


def slug(kind: str, text: str) -> str:
    """A folder's name for a source: readable, and another one for each."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80]
    return f"{kind}--{readable}--{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def kept(path: Path, sha256: str | None = None) -> KeptFile:
    """A file's description for the record."""
    found = path.stat()
    return KeptFile(size=found.st_size, mtime_ns=found.st_mtime_ns, sha256=sha256 or sha256_of(path))


def whole(folder: Path) -> Record | None:
    """A version's record, if it lies here and its files are what was verified; None otherwise.

    Files are compared by size and time, by content where the time differs.
    """
    try:
        record = msgspec.json.decode((folder / RECORD_FILE).read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None
    for name, file in record.files.items():
        try:
            found = (folder / name).stat()
        except OSError:
            return None
        if found.st_size != file.size:
            return None
        if found.st_mtime_ns != file.mtime_ns and sha256_of(folder / name) != file.sha256:
            return None
    return record


def publish(files: Path, final: Path, record: Record) -> Path:
    """Give a folder of what was verified its name, in one step. A damaged folder of that name goes first."""
    (files / RECORD_FILE).write_bytes(msgspec.json.encode(record))
    if final.exists():
        shutil.rmtree(final)
    files.rename(final)
    _sync(final.parent)
    return final


def point(link: Path, target: Path) -> None:
    """Make a symbolic link, or move it, so that at each moment it leads somewhere."""
    if link.is_dir() and not link.is_symlink():
        raise FetchError(f"{link}: is a folder already; a link cannot take its place", FetchReason.REFUSED)
    scratch = link.with_name(f".{link.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target)
    scratch.replace(link)


def latest(pointer: Path) -> tuple[Path, Record] | None:
    """The version that a link names, if it lies here whole."""
    try:
        folder = pointer.parent / pointer.readlink()
    except OSError:
        return None
    record = whole(folder)
    return None if record is None else (folder, record)


def check_room(root: Path, *, needed: int, most: int, total: int, what: str) -> None:
    """Raise ``FetchError`` where a model is larger than allowed, or the disk has no room for what is still to come.

    Args:
        needed: bytes still to be written.
        most: bytes that the whole model may have.
        total: bytes that it has.
    """
    if total > most:
        raise FetchError(
            f"{what}: {size_text(total)}, but at most {size_text(most)} may be fetched here"
            " (--max-bytes; in a service's pod spec.model.size)",
            FetchReason.DISK_FULL,
        )
    free = shutil.disk_usage(root).free
    if needed + ROOM_LEFT > free:
        raise FetchError(
            f"{what}: not enough room: {size_text(needed)} to fetch, {size_text(max(0, free - ROOM_LEFT))} free in"
            f" {root}; make room, or set KVFERRY_MODELS to another folder",
            FetchReason.DISK_FULL,
        )


def disk_fault(error: OSError, what: str) -> FetchError:
    """What the disk refused."""
    if error.errno in _FULL:
        return FetchError(f"{what}: no space left: {error.strerror}", FetchReason.DISK_FULL)
    return FetchError(f"{what}: cannot be written: {error.strerror or error}")


@contextmanager
def locked(root: Path, name: str, wait_s: float) -> Iterator[None]:
    """One fetch of a model at a time over all processes of the machine. Raises ``FetchError`` after ``wait_s``."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".{name}.lock").open("w")
    except OSError as error:
        raise FetchError(
            f"{root}: cannot be written ({error.strerror}); set KVFERRY_MODELS to another folder"
        ) from error
    with lock:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FetchError(f"{root}: another process has been fetching {name} for too long") from None
                time.sleep(LOCK_POLL_S)
        yield


def size_text(size: int) -> str:
    """A number of bytes for people."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _sync(folder: Path) -> None:
    """Make a rename last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
