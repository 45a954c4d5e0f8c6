"""How far a fetch is: a bar for a person, a line now and then for a log, nothing if so asked."""

import io
import threading

import pytest

from kvferry_runtime.model.fetch import progress as showing
from kvferry_runtime.model.fetch.progress import Progress, progress_line, shown


class Stream(io.StringIO):
    """A stream that tells when something was written."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_a_log_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """One each interval, with how much, how fast and how long still."""
    monkeypatch.setattr(showing, "LINE_S", 0.01)
    out, progress = Stream(terminal=False), Progress()
    progress.total = 4 * 2**20
    with shown(progress, "hf://org/m", "auto", out):
        progress.add(2**20)
        assert out.written.wait(10)
    lines = out.getvalue().splitlines()
    assert lines and all(line.startswith("hf://org/m: ") for line in lines)
    assert "\r" not in out.getvalue()


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn in place, and gone when it is done."""
    monkeypatch.setattr(showing, "BAR_S", 0.01)
    out, progress = Stream(terminal=True), Progress()
    progress.total = 100
    with shown(progress, "x", "auto", out):
        progress.add(50)
        assert out.written.wait(10)
    assert "\r" in out.getvalue()


def test_quiet_is_quiet() -> None:
    """Not a byte."""
    out = Stream(terminal=True)
    with shown(Progress(), "x", "none", out):
        pass
    assert not out.getvalue()


def test_a_line_tells_size_rate_and_rest() -> None:
    """And does not guess where nothing is known or nothing moves."""
    assert progress_line("m", 2**30, 4 * 2**30, 2**20) == "m: 1.0 GiB of 4.0 GiB (25 %), 1.0 MiB/s, 3073 s to go"
    assert progress_line("m", 5, 10, 0.0) == "m: 5 B of 10 B (50 %), 0 B/s"
    assert progress_line("m", 0, 0, 0.0) == "m: asking for its files"
