"""Which process a pid means: a pid with its start time, so that a pid used again is never mistaken for ours."""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import psutil


class ProcessId(msgspec.Struct, frozen=True):
    """A process for ever: ``started`` is its start time as the kernel counts it (see ``_start_time``)."""

    pid: int
    started: float

    def alive(self) -> bool:
        """Whether this very process runs (a zombie does not)."""
        return self.process() is not None

    def process(self) -> psutil.Process | None:
        """A handle to it; ``None`` once it is gone."""
        try:
            process = psutil.Process(self.pid)
            if _start_time(self.pid) != self.started or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process; ``None`` where there is none."""
    try:
        return ProcessId(pid, _start_time(pid))
    except psutil.NoSuchProcess:
        return None


def own_identity() -> ProcessId:
    """This process."""
    return ProcessId(os.getpid(), _start_time(os.getpid()))


def _start_time(pid: int) -> float:
    """On Linux clock ticks since boot, which a change of the wall clock does not move; elsewhere seconds."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return psutil.Process(pid).create_time()
    # Field 22, counted behind the command's name, which may hold blanks and parentheses.
    return float(stat.rpartition(b")")[2].split()[19])


def signal_process(target: ProcessId, number: signal.Signals) -> bool:
    """Send a signal to this very process. Returns whether it was there."""
    process = target.process()
    if process is None:
        return False
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def kill_trees(roots: Iterable[ProcessId], wait_s: float = 5.0) -> list[int]:
    """SIGKILL processes and all that descends from them; returns the pids that were found alive."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        process = root.process()
        if process is None:
            continue
        found[process.pid] = process
        try:
            found.update((child.pid, child) for child in process.children(recursive=True))
        except psutil.NoSuchProcess:
            continue  # it has ended meanwhile
    for process in found.values():
        try:
            process.kill()  # checks the start time before it signals
        except psutil.NoSuchProcess:
            continue  # it has ended meanwhile
    psutil.wait_procs(list(found.values()), timeout=wait_s)
    return sorted(found)


def wait_gone(targets: Sequence[ProcessId], timeout_s: float) -> bool:
    """Wait until none of the processes runs. Returns False when time is up."""
    deadline = time.monotonic() + timeout_s
    while any(target.alive() for target in targets):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True
