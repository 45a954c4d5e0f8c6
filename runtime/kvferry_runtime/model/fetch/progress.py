"""Shows how far a fetch is: a bar on a terminal, a line each ten seconds elsewhere, nothing if so asked."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from kvferry_runtime.model.fetch.options import Show
from kvferry_runtime.model.fetch.place import size_text

BAR_S, LINE_S = 0.2, 10.0


class Progress:
    """Bytes of a model that have arrived, counted by the fetch and read by whoever shows them."""

    def __init__(self) -> None:
        self.total = 0
        self.done = 0

    def add(self, count: int) -> None:
        self.done += count


def say(show: Show, text: str, stream: TextIO | None = None) -> None:
    """One line for people."""
    if show == "auto":
        print(text, file=stream or sys.stderr, flush=True)


@contextmanager
def shown(progress: Progress, what: str, show: Show, stream: TextIO | None = None) -> Iterator[None]:
    """Show a progress while the body runs."""
    out = stream or sys.stderr
    if show == "none":
        yield
        return
    ended = threading.Event()
    draw = _bar if out.isatty() else _lines
    thread = threading.Thread(target=draw, args=(progress, what, out, ended), daemon=True, name="fetch-progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bar(progress: Progress, what: str, out: TextIO, ended: threading.Event) -> None:
    from tqdm import tqdm

    with tqdm(desc=what, total=0, unit="B", unit_scale=True, unit_divisor=1024, file=out, leave=False) as bar:
        while not ended.wait(BAR_S):
            bar.total, bar.n = progress.total, progress.done
            bar.refresh()


def _lines(progress: Progress, what: str, out: TextIO, ended: threading.Event) -> None:
    before = progress.done
    while not ended.wait(LINE_S):
        now = progress.done
        print(progress_line(what, now, progress.total, (now - before) / LINE_S), file=out, flush=True)
        before = now


def progress_line(what: str, done: int, total: int, rate: float) -> str:
    """One line: how much of how much, how fast, how long still."""
    if not total:
        return f"{what}: asking for its files"
    line = f"{what}: {size_text(done)} of {size_text(total)} ({100 * done // total} %), {size_text(int(rate))}/s"
    if rate >= 1 and done < total:
        line += f", {int((total - done) / rate) + 1} s to go"
    return line
