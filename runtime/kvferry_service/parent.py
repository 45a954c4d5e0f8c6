"""Death with the parent: no process of ours outlives the one that started it.

Two mechanisms, since either alone has a hole. The parent keeps the writing end of a pipe; its end, of whatever cause,
is read as end-of-file by a thread of the child. On Linux the kernel also sends the child a signal, which reaches even
a child whose threads are all stuck.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1


class Child:
    """A started process and the writing end of its parent pipe."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: int) -> None:
        self.process = process
        self._pipe: int | None = pipe

    @property
    def pid(self) -> int:
        return self.process.pid

    def let_go(self) -> None:
        """Close the pipe: the child ends in order, as if this process had died. Idempotent."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def stop(self, grace_s: float) -> int:
        """End the child in order, or by SIGKILL after ``grace_s`` seconds. Blocks; returns the exit status."""
        self.let_go()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def own_module(name: str) -> list[str]:
    """The command line that runs a module of ours with this interpreter; arguments may follow.

    ``-P``: no file of the working directory is imported in place of an installed module.
    """
    return [sys.executable, "-P", "-m", name]


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    new_session: bool = False,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start a process that calls ``die_with_parent(N, ...)`` with the ``--parent-fd N`` appended to its arguments.

    Call it from a thread that lives as long as this process: the kernel's signal follows the thread that started the
    child.

    Args:
        new_session: put the child in a session of its own, so that a terminal's Ctrl-C does not reach it.
    """
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(  # noqa: S603 - the arguments are the caller's, no shell is involved
            [*argv, "--parent-fd", str(read_end)],
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=new_session,
            pass_fds=(*pass_fds, read_end),
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return Child(process, write_end)


def die_with_parent(
    fd: int | None,
    on_gone: Callable[[], None],
    *,
    grace_s: float,
    death_signal: signal.Signals | None = signal.SIGTERM,
) -> None:
    """Watch the parent from now on. Called once, early, by the main thread of a child.

    Args:
        fd: the reading end of the parent pipe (``--parent-fd``); ``None`` watches nothing.
        on_gone: called in a thread of its own when the parent is gone: starts the ordered end.
        grace_s: seconds from then until the process ends hard, with status 1.
        death_signal: what the kernel sends when the parent's thread ends (Linux only); ``None`` sends nothing.

    Raises:
        ValueError: ``fd`` is no open descriptor.
    """
    if fd is None:
        return
    try:
        os.fstat(fd)
    except OSError:
        raise ValueError(f"--parent-fd {fd}: not an open file descriptor") from None
    os.set_inheritable(fd, False)
    if death_signal is not None and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)

    def watch() -> None:
        # A parent that died before prctl took effect has closed the pipe as well.
        _wait_for_end(fd)
        hard = threading.Timer(grace_s, os._exit, (1,))
        hard.daemon = True
        hard.start()
        on_gone()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _wait_for_end(fd: int) -> None:
    while True:
        select.select([fd], [], [])
        try:
            if not os.read(fd, 256):
                return
        except InterruptedError:
            continue  # a signal, not the parent's end
        except OSError:
            return
