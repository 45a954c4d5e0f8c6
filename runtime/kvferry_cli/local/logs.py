"""Logs of local pods: to files with a cap on their size, and to the terminal with a prefix per pod.

The terminal is written by a thread of its own behind a bounded queue: a terminal that is held or slow must not stop
the launcher from reading its pods' output, and so the pods.
"""

import os
import queue
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TextIO

MAX_FILE_BYTES = 8 * 2**20  # of one file; the part before it is kept as NAME.log.1
TAIL_LINES = 20
QUEUE_LINES = 10_000
LAUNCHER = "kvferry"

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LAUNCHER_COLOUR = 1


class LogFile:
    """One pod's log file and its last lines."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file = path.open("ab", buffering=0)
        path.chmod(0o600)
        self._size = self._file.tell()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def write(self, line: str) -> None:
        """Append a line; the file becomes the older part when it is full."""
        data = line.encode("utf-8", "replace") + b"\n"
        if self._size + len(data) > self._max_bytes and self._size:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab", buffering=0)
            self._path.chmod(0o600)
            self._size = 0
        self._file.write(data)
        self._size += len(data)
        self._tail.append(line)

    def begin(self) -> None:
        """A new process starts to write: the tail is its own."""
        self._tail.clear()

    def tail(self, count: int = TAIL_LINES) -> list[str]:
        """The last lines of the process that writes now, oldest first."""
        return list(self._tail)[-count:]

    def close(self) -> None:
        self._file.close()


class Screen:
    """Writes ``name | line`` to a stream, in colour where it is a terminal."""

    def __init__(self, names: list[str], stream: TextIO | None = None, *, quiet: bool = False) -> None:
        """``quiet`` shows the launcher's own lines only; the pods' go to their files."""
        self._stream = stream if stream is not None else sys.stdout
        self._quiet = quiet
        self._width = max((len(name) for name in (*names, LAUNCHER)), default=0)
        self._colours: dict[str, int] = {}
        if self._stream.isatty() and not os.environ.get("NO_COLOR"):
            self._colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
            self._colours[LAUNCHER] = _LAUNCHER_COLOUR
        self._queue: queue.Queue[str | None] = queue.Queue(QUEUE_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
        self._thread.start()

    def line(self, name: str, text: str) -> None:
        """Show one line of a pod, or of the launcher. Never blocks: what a full queue cannot take is counted."""
        if self._quiet and name != LAUNCHER:
            return
        clean = "".join(char if char.isprintable() or char == "\t" else "?" for char in text)
        prefix = f"{name:<{self._width}} | "
        colour = self._colours.get(name)
        if colour is not None:
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        try:
            if self._dropped:
                self._queue.put_nowait(f"... {self._dropped} lines were not shown; they are in the log files\n")
                self._dropped = 0
            self._queue.put_nowait(f"{prefix}{clean}\n")
        except queue.Full:
            self._dropped += 1

    def say(self, text: str) -> None:
        """Show lines of the launcher itself."""
        for line in text.splitlines():
            self.line(LAUNCHER, line)

    def pending(self) -> int:
        """Lines that have not been written yet."""
        return self._queue.qsize()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued, for at most so long."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (text := self._queue.get()) is not None:
            try:
                self._stream.write(text)
                if self._queue.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                return  # the terminal is gone; the files go on
