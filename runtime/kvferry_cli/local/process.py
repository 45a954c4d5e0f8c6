"""One running process of a pod: a session of its own, watched through a pidfd, killed as a group.

When the process ends, its group is killed before the process is reaped: as long as it is a zombie its pid cannot be
given to another process, so the signal reaches what it left behind and nobody else.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry_cli.local.identity import ProcessId, identify
from kvferry_cli.local.pod import LocalPod, environment
from kvferry_service.parent import spawn

POLL_S = 0.1  # where there is no pidfd
MAX_LINE_BYTES = 16 * 1024
CHUNK_BYTES = 64 * 1024


class PodProcess:
    """A started process. Everything runs on the event loop's thread."""

    def __init__(
        self, pod: LocalPod, cwd: Path, on_line: Callable[[str], None], on_exit: Callable[[str, int], None]
    ) -> None:
        """Start the process.

        Args:
            pod: what to run.
            cwd: its working directory.
            on_line: called with each line of its output, without the line end.
            on_exit: called once, with how it ended in words and its return code (negative: the signal).

        Raises:
            OSError: it could not be started.
        """
        self._loop = asyncio.get_running_loop()
        self._on_line, self._on_exit = on_line, on_exit
        self._output, write_end = os.pipe()
        try:
            # From the main thread: the kernel's death signal follows the thread that starts a child.
            with _cores_of_children(pod.cores):
                self._child = spawn(
                    pod.argv,
                    env=environment(pod),
                    cwd=cwd,
                    stdout=write_end,
                    stderr=write_end,
                    new_session=True,
                )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(write_end)
        self.identity: ProcessId | None = identify(self._child.pid)
        self._buffer = b""
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._read)
        self._output_open = True
        self._pidfd: int | None = None
        self._watch()

    @property
    def pid(self) -> int:
        return self._child.pid

    def terminate(self) -> None:
        """Ask the process to stop; no effect once it has ended."""
        if self._child.process.returncode is None:
            self._child.process.terminate()

    def kill(self) -> None:
        """Kill the process and its group; no effect once it has ended."""
        if self._child.process.returncode is None:
            self._kill_group()

    def _watch(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or a kernel or sandbox without pidfds
            self._loop.call_later(POLL_S, self._poll)
            return
        self._loop.add_reader(self._pidfd, self._ended)

    def _poll(self) -> None:
        if self._child.process.poll() is None:
            self._loop.call_later(POLL_S, self._poll)
        else:
            self._ended()

    def _ended(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._kill_group()
        code = self._child.process.wait()
        self._child.let_go()
        if self._output_open:
            self._read()
            self._close_output()
        self._on_exit(describe_exit(code), code)

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # nothing of the group is left; macOS says so for zombies by EPERM

    def _read(self) -> None:
        """Take what the process has written; a line without an end is cut at a bound."""
        for _ in range(16):  # a chatty pod must not starve the loop
            try:
                data = os.read(self._output, CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close_output()
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._emit(line)
            while len(self._buffer) > MAX_LINE_BYTES:
                self._emit(self._buffer[:MAX_LINE_BYTES])
                self._buffer = self._buffer[MAX_LINE_BYTES:]

    def _emit(self, line: bytes) -> None:
        self._on_line(line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r"))

    def _close_output(self) -> None:
        if self._output_open:
            self._output_open = False
            self._loop.remove_reader(self._output)
            os.close(self._output)
            if self._buffer:
                self._emit(self._buffer)


@contextmanager
def _cores_of_children(cores: tuple[int, ...]) -> Iterator[None]:
    """What this thread starts meanwhile runs on these cores, and so do its descendants. Raises ``OSError``."""
    if not cores:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def describe_exit(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
