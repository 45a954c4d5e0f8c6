"""What the machine's cores do while nothing of a benchmark runs on them."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

_READY_S = 30.0
_AUTOGROUP = Path("/proc/self/autogroup")


@contextmanager
def kept_awake() -> Iterator[None]:
    """Cores that do not sleep, so that a thread which is woken need not wait for its core to wake up first.

    On each of them a process computes whenever nobody else wants to (SCHED_IDLE, which gives way at once). On a virtual
    machine a core that sleeps has to be scheduled by the host again, at 20 to 100 microseconds for each wait.
    """
    context = multiprocessing.get_context("spawn")
    started = [context.Event() for _ in os.sched_getaffinity(0)]
    spinners = [
        context.Process(target=_spin, args=(core, event), daemon=True)
        for core, event in zip(sorted(os.sched_getaffinity(0)), started, strict=True)
    ]
    for spinner in spinners:
        spinner.start()
    try:
        for event in started:
            if not event.wait(_READY_S):
                raise RuntimeError(f"a core's process has not started within {_READY_S:g} s")
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def _spin(core: int, started: Event) -> None:
    os.setsid()
    if _AUTOGROUP.exists():  # the kernel shares out cores among sessions first, among their threads then
        _AUTOGROUP.write_text("19")
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    started.set()
    while True:
        pass
