"""Where the programs of a Kubernetes cluster lie, and what to do where they are absent."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "e2e" / "tools" / "build.sh"
PROGRAMS = {"apiserver": ("kube-apiserver", "etcd", "kubectl"), "helm": ("helm3", "helm4")}
HELP = "`make test-tools` builds them once (it needs Go and takes minutes)"

Group = Literal["apiserver", "helm"]


class Absent(Exception):
    """Programs are not there; the message says which, and how to get them."""


@cache
def find_tools(group: Group) -> Path:
    """The folder that holds a group's programs. Raises ``Absent``."""
    given = os.environ.get("KUBEBUILDER_ASSETS")
    if group == "apiserver" and given:
        missing = [name for name in PROGRAMS[group] if not os.access(Path(given) / name, os.X_OK)]
        if missing:
            raise Absent(f"KUBEBUILDER_ASSETS is {given}, where there is no {', '.join(missing)}")
        return Path(given).absolute()
    done = subprocess.run([str(BUILD), "--find", group], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return Path(done.stdout.splitlines()[-1])
    instead = ", or set KUBEBUILDER_ASSETS to a folder that holds them" if group == "apiserver" else ""
    raise Absent(f"{', '.join(PROGRAMS[group])} are not there: {HELP}{instead}")


def tools_or_skip(group: Group) -> Path:
    """The folder; without it the test is skipped, but fails under ``CI`` where Go could have built the programs."""
    try:
        return find_tools(group)
    except Absent as absent:
        if os.environ.get("CI") and shutil.which("go"):
            pytest.fail(str(absent))
        pytest.skip(str(absent))
