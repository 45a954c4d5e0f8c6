"""Discovery from a JSON file that the local launcher writes: ``{"pods": [{name, role, host, http, state}, ...]}``."""

import asyncio
from pathlib import Path

import msgspec

from kvferry_router.discovery.endpoints import Endpoint, Take
from kvferry_service import logs

_FILE_BYTES = 4 * 2**20
_log = logs.get_logger(__name__)


class PodsFileError(ValueError):
    """A pods file that cannot be used; the message names the file and the field."""


class _PodsFile(msgspec.Struct, frozen=True):
    pods: tuple[Endpoint, ...]


def parse_pods(content: bytes, *, where: str, max_pods: int) -> tuple[Endpoint, ...]:
    """Read the endpoints. Raises ``PodsFileError``."""
    try:
        pods = msgspec.json.decode(content, type=_PodsFile).pods
    except msgspec.DecodeError as error:
        raise PodsFileError(f"{where}: {error}") from None
    if len(pods) > max_pods:
        raise PodsFileError(f"{where}: {len(pods)} pods; at most {max_pods} are accepted")
    names = [pod.name for pod in pods]
    for pod in pods:
        if not pod.name or names.count(pod.name) > 1:
            raise PodsFileError(f"{where}: the name {pod.name!r} is empty or used twice")
        for field in ("http", "state"):
            if not 1 <= getattr(pod, field) <= 65535:
                raise PodsFileError(f"{where}: {pod.name}: {field} is {getattr(pod, field)}; a TCP port is expected")
    return pods


class PodsFile:
    """The file, read again when its change time, size or inode does."""

    def __init__(self, path: Path, max_pods: int) -> None:
        self._path = path
        self._max_pods = max_pods
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> tuple[Endpoint, ...] | None:
        """The endpoints if the file changed since the last call; ``None`` if it did not.

        Raises:
            PodsFileError: it cannot be used; told once per change, and the caller keeps what it had.
        """
        try:
            status = self._path.stat()
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            if mark == self._seen:
                return None
            self._seen = mark
            if status.st_size > _FILE_BYTES:
                raise PodsFileError(f"{self._path}: larger than {_FILE_BYTES} bytes")
            content = self._path.read_bytes()
        except OSError as error:
            if self._seen == (-1, -1, -1):
                return None
            self._seen = (-1, -1, -1)
            raise PodsFileError(f"{self._path}: {error.strerror}") from None
        return parse_pods(content, where=str(self._path), max_pods=self._max_pods)


class FilePods:
    """Discovery by a pods file."""

    def __init__(self, file: PodsFile, poll_s: float) -> None:
        self._file = file
        self._poll_s = poll_s
        self._unknown = "the pods file has not been read yet"
        self._current = False

    def why_unknown(self) -> str:
        """Why the pods are not known yet; empty once they are."""
        return self._unknown

    def current(self) -> bool:
        """Whether the file could be used when it changed last."""
        return self._current

    async def follow(self, take: Take) -> None:
        """Tell of all pods, at first and at each change, until cancelled."""
        while True:
            try:
                pods = self._file.changed()
            except PodsFileError as error:
                self._current = False
                _log.error("the pods file cannot be used; the pods known stay", extra=logs.fields(reason=str(error)))
            else:
                if pods is not None:
                    self._unknown, self._current = "", True
                    take(pods)
            await asyncio.sleep(self._poll_s)
