"""No process of ours outlives its parent."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kvferry_service.metrics import BoundedLabel
from kvferry_service.parent import die_with_parent, own_module, spawn

CHILD = """
    import argparse, os, pathlib, signal, sys, threading
    from kvferry_service.parent import die_with_parent
    parser = argparse.ArgumentParser()
    parser.add_argument("mark"); parser.add_argument("how"); parser.add_argument("--parent-fd", type=int)
    given = parser.parse_args()
    done = threading.Event()
    def gone():
        pathlib.Path(given.mark).write_text("gone")
        if given.how == "ordered":
            done.set()
    die_with_parent(given.parent_fd, gone, grace_s=0.3, death_signal=None)
    pathlib.Path(given.mark).write_text(str(os.getpid()))
    done.wait()
"""
PARENT = """
    import pathlib, sys, time
    from kvferry_service.parent import spawn
    spawn([sys.executable, *sys.argv[1:]])
    time.sleep(60)
"""


def until(true: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["ordered", "stuck"])
def test_kill_9_of_the_parent_ends_the_child(tmp_path: Path, how: str) -> None:
    """The child ends in order, and hard after the grace when it does not."""
    (tmp_path / "child.py").write_text(textwrap.dedent(CHILD))
    (tmp_path / "parent.py").write_text(textwrap.dedent(PARENT))
    mark = tmp_path / "mark"
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py", tmp_path / "child.py", mark, how])
    try:
        until(lambda: mark.exists() and mark.read_text().isdigit())
        child = psutil.Process(int(mark.read_text()))
        os.kill(parent.pid, signal.SIGKILL)
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert mark.read_text() == "gone"
    finally:
        parent.kill()
        parent.wait()


def test_stop_ends_a_child_that_ignores_sigterm() -> None:
    """``Child.stop`` needs no cooperation."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    child = spawn([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.process.stdout is not None
    child.process.stdout.readline()
    assert child.stop(0.2) == -signal.SIGKILL
    child.process.stdout.close()
    child.let_go()


def test_a_closed_parent_fd_is_refused() -> None:
    """A wrong ``--parent-fd`` is an error that names the flag, not a process without a parent."""
    with pytest.raises(ValueError, match="--parent-fd 987"):
        die_with_parent(987, lambda: None, grace_s=1.0)


def test_our_module_is_not_replaced_by_the_working_directory(tmp_path: Path) -> None:
    """A file or folder there named like a package of ours, or like one that we import, is not imported."""
    for name in ("kvferry_service", "zmq", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    done = subprocess.run(
        own_module("kvferry_service.curve"), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_labels_are_bounded() -> None:
    """Beyond the limit every new value is counted as ``other``."""
    label = BoundedLabel(2)
    assert [label.value(name) for name in ("a", "b", "c", "a")] == ["a", "b", "other", "a"]
