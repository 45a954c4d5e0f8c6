"""`make test`: what may share the cores, then what keeps time against real processes, alone."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.__main__ import combined, commands
from tests.repo.sources import ROOT
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(400)

PLUGINS = "pytest_asyncio.plugin,pytest_timeout,xdist.plugin"
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


@contextmanager
def begun(suite: Path, *options: str, **env: str) -> "Iterator[subprocess.Popen[str]]":
    """A run of that suite, with the plugins that it needs alone."""
    (suite / "noted").write_text("")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests", *options],
        cwd=suite,
        env=own | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": PLUGINS} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(suite: Path, *options: str, **env: str) -> tuple[int, str]:
    """Its status and what it said."""
    with begun(suite, *options, **env) as process:
        return ended(process)


def noted(suite: Path) -> list[str]:
    """The tests that ran, in order."""
    return [line.split()[0] for line in (suite / "noted").read_text().splitlines()]


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_all_run_once_processes_last_and_what_failed_again(suite: Path) -> None:
    """Workers share the first part, one of them has the API server's tests; the second part is one process.

    With `--last-failed`, as `.ci/run` asks, each part runs its own failures again and nothing else.
    """
    status, output = run(suite, FAIL="shared-2 alone")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert sorted(noted(suite)) == ["alone", "served", "served", *(f"shared-{number}" for number in range(4))]
    lines = (suite / "noted").read_text().splitlines()
    assert lines[-1] == "alone alone"
    (worker,) = {line.split()[1] for line in lines if line.startswith("served")}
    assert worker.startswith("gw")
    status, output = run(suite, "-n", "0", "--last-failed", "--last-failed-no-failures=none", FAIL="alone")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert noted(suite) == ["shared-2", "alone"]
    status, output = run(suite, "-n", "0", "--last-failed", "--last-failed-no-failures=none")
    assert status == pytest.ExitCode.OK, output
    assert noted(suite) == ["alone"]


def test_the_first_failure_ends_a_run_that_wants_no_more(suite: Path) -> None:
    """`-x`: the second part does not begin."""
    status, output = run(suite, "-x", "-n", "0", FAIL="shared-1")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "shared-1" in noted(suite) and "alone" not in noted(suite)


def test_an_interrupt_ends_all(suite: Path) -> None:
    """Ctrl-C goes to the whole group: pytest ends in order, and the status tells."""
    with begun(suite, "-n", "0", STAY="60") as process:
        wait_for(lambda: "alone" in noted(suite), "the second part", 60)
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
