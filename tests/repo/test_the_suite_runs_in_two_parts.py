"""`make test`: what may share the cores, then what keeps time against real processes, alone."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.__main__ import combined, commands
from tests.repo.sources import ROOT

# Notes when each test runs; `fail` names those that fail.
SUITE = """
import os, time
import pytest
from pathlib import Path

def note(name):
    with Path("noted").open("a") as file:
        file.write(f"{name} {os.environ.get('PYTEST_XDIST_WORKER', 'alone')}\\n")
    assert name not in os.environ.get("FAIL", ""), name

@pytest.mark.parametrize("number", range(4))
def test_shared(number):
    note(f"shared-{number}")

@pytest.mark.processes
def test_alone():
    note("alone")
    time.sleep(float(os.environ.get("STAY", "0")))
"""
SERVED = "from ..test_suite import note\n\ndef test_one():\n    note('served')\n\ndef test_two():\n    note('served')\n"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small suite under the repository's own settings."""
    for folder in ("tests", "tests/apiserver"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    for name in ("pyproject.toml", "tests/__main__.py", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests/test_suite.py").write_text(SUITE)
    (tmp_path / "tests/apiserver/test_served.py").write_text(SERVED)
    return tmp_path


def begin(suite: Path, *options: str, **env: str) -> "subprocess.Popen[str]":
    (suite / "noted").write_text("")
    return subprocess.Popen(
        [sys.executable, "-m", "tests", "-p", "no:randomly", *options],
        cwd=suite,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def noted(suite: Path) -> list[str]:
    """The tests that ran, in order."""
    return [line.split()[0] for line in (suite / "noted").read_text().splitlines()]


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_all_run_once_processes_last_and_what_failed_again(suite: Path) -> None:
    """Workers share the first part, one of them has the API server's tests; the second part is one process.

    With `--last-failed`, as `.ci/run` asks, each part runs its own failures again and nothing else.
    """
    status, output = ended(begin(suite, FAIL="shared-2 alone"))
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert sorted(noted(suite)) == ["alone", "served", "served", *(f"shared-{number}" for number in range(4))]
    lines = (suite / "noted").read_text().splitlines()
    assert lines[-1] == "alone alone"
    (worker,) = {line.split()[1] for line in lines if line.startswith("served")}
    assert worker.startswith("gw")
    status, output = ended(begin(suite, "-n", "0", "--last-failed", "--last-failed-no-failures=none", FAIL="alone"))
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert noted(suite) == ["shared-2", "alone"]
    status, output = ended(begin(suite, "-n", "0", "--last-failed", "--last-failed-no-failures=none"))
    assert status == pytest.ExitCode.OK, output
    assert noted(suite) == ["alone"]


def test_the_first_failure_ends_a_run_that_wants_no_more(suite: Path) -> None:
    """`-x`: the second part does not begin."""
    status, output = ended(begin(suite, "-x", "-n", "0", FAIL="shared-1"))
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "shared-1" in noted(suite) and "alone" not in noted(suite)


def test_an_interrupt_ends_all(suite: Path) -> None:
    """Ctrl-C goes to the whole group: pytest ends in order, and the status tells."""
    process = begin(suite, "-n", "0", STAY="60")
    deadline = time.monotonic() + 60
    while "alone" not in noted(suite):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    status, output = ended(process)
    assert status == pytest.ExitCode.INTERRUPTED, output
    assert "KeyboardInterrupt" in output


def test_a_choice_by_marks_narrows_both_parts() -> None:
    """`-m` of the caller's does not replace the parts' own."""
    assert [command[command.index("-m", 3) + 1] for command in commands(["-q", "-m", "model or slow"])] == [
        "(model or slow) and not processes",
        "(model or slow) and processes",
    ]
    assert all(command[-1] == "-q" for command in commands(["-q", "-m", "model"]))


@pytest.mark.parametrize(
    ("statuses", "expected"), [([0, 0], 0), ([5, 0], 0), ([0, 5], 0), ([5, 5], 5), ([0, 1], 1), ([2], 2), ([5, 1], 1)]
)
def test_the_status_is_that_of_the_worse_part(statuses: list[int], expected: int) -> None:
    """A part in which no test was chosen counts for nothing."""
    assert combined(statuses) == expected
