"""``python -m tests [pytest options]``: all tests, in two parts, as `make test` runs them.

Tests that start kvferry's own processes (marker `processes`) hold them to times of seconds: nothing runs beside them.
All others share the cores, so that what waits leaves its core to what computes. Options hold for both parts; each part
keeps its own record of what failed, for ``--last-failed``.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

WORKERS = (os.cpu_count() or 1) + 1  # the one with the API server's tests mostly waits for what it has started
PARTS = {
    "shared": ("not processes", ["--numprocesses", str(WORKERS)]),
    "alone": ("processes", []),
}
GOOD = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def commands(options: Sequence[str]) -> list[list[str]]:
    """The pytest command line of each part. A ``-m`` of the caller's narrows both."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", dest="marks")
    known, rest = parser.parse_known_args(options)
    return [
        [
            *(sys.executable, "-m", "pytest", "tests", "-m", f"({known.marks}) and {marks}" if known.marks else marks),
            *("-o", f"cache_dir=.pytest_cache/{name}", *own, *rest),
        ]
        for name, (marks, own) in PARTS.items()
    ]


def combined(statuses: Sequence[int]) -> int:
    """The first bad status; without one, good if any test ran."""
    return next((status for status in statuses if status not in GOOD), min(statuses))


def main(options: Sequence[str]) -> int:
    """Run both parts; after an interruption, or a failure under ``-x``, the first alone."""
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest has it, too, and ends in order
    statuses: list[int] = []
    for command in commands(options):
        print(f"== {shlex.join(command[1:])}", flush=True)
        statuses.append(subprocess.run(command, check=False).returncode)
        first_only = {"-x", "--exitfirst"} & {*options} or any(each.startswith("--maxfail") for each in options)
        if statuses[-1] == pytest.ExitCode.INTERRUPTED or (first_only and statuses[-1] not in GOOD):
            break
    return combined(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
