"""Counts the restarts of an engine inside its pod: the pod's process stays, its ready file names a new incarnation."""

from pathlib import Path

import msgspec


class _ReadyFile(msgspec.Struct, frozen=True):
    incarnation: str


class EngineRestarts:
    """The count of one pod over all its processes."""

    def __init__(self, file: Path | None) -> None:
        """``file``: the pod's ready file; ``None`` for a pod without an engine."""
        self._file = file
        self._incarnation = ""
        self.count = 0

    def begin(self) -> None:
        """A new process starts: its first incarnation is no restart of the engine. Raises ``OSError``."""
        self._incarnation = ""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def look(self) -> None:
        """Read the file; one that is missing or damaged tells nothing."""
        if self._file is None:
            return
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=_ReadyFile).incarnation
        except (OSError, msgspec.DecodeError):
            return
        if self._incarnation and found != self._incarnation:
            self.count += 1
        self._incarnation = found
