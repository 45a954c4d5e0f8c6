"""The Makefile: what a new user types first."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repo.sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_every_target() -> None:
    """`make` alone explains itself."""
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)).split()
    assert "serve" in phony
    listed = make().stdout
    assert not [target for target in phony if f"  {target} " not in listed]


def test_serve_starts_the_example_on_the_port_given(tmp_path: Path) -> None:
    """PORT moves the endpoint."""
    planned = make("-n", "serve", "PORT=1234", f"VENV={tmp_path}/venv").stdout
    assert "kvferry up examples/smollm2.yaml --port 1234" in planned
    assert "uv sync --locked" in planned


@pytest.mark.parametrize(
    ("python", "expected"),
    [("no-such-python", "there is no 'no-such-python'"), ("old-python", "kvferry needs Python 3.11 or newer; ")],
)
def test_a_missing_or_old_python_is_told_plainly(tmp_path: Path, python: str, expected: str) -> None:
    """The message says what is needed and how to name another interpreter."""
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\n[ \"$1\" = -V ] && echo 'Python 3.8.1' && exit 0\nexit 1\n")
    old.chmod(0o755)
    given = str(old) if python == "old-python" else python
    result = make("install", f"PYTHON={given}", f"VENV={tmp_path}/venv")
    assert result.returncode != 0
    assert expected in result.stderr
    assert "make PYTHON=/path/to/python3" in result.stderr


def test_targets_do_nothing_when_nothing_has_changed(tmp_path: Path) -> None:
    """Stamp files make installing idempotent."""
    venv = tmp_path / "venv"
    venv.mkdir()
    for stamp in ("python", "uv", "runtime", "dev"):
        (venv / f".stamp-{stamp}").touch()
    assert "uv sync" not in make("-n", "serve", f"VENV={venv}").stdout
    assert "uv sync" not in make("-n", "test", f"VENV={venv}").stdout
