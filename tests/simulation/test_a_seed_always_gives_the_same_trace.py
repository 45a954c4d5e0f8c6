"""A seed is a whole history: whoever runs it again, in whatever process, sees the same events in the same order."""

import os
import subprocess
import sys

from tests.simulation.run import run_scenario
from tests.simulation.scenario import PROFILES, make_scenario

_SEEDS = range(2 * len(PROFILES))


def _hashes() -> list[str]:
    return [run_scenario(make_scenario(seed)).trace_hash for seed in _SEEDS]


def test_trace_does_not_depend_on_the_hash_seed() -> None:
    """Two processes with different PYTHONHASHSEED give the same trace hashes, for seeds of every profile."""
    program = (
        "from tests.simulation.test_a_seed_always_gives_the_same_trace import _hashes\nprint('\\n'.join(_hashes()))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.split()
        for hash_seed in ("1", "2")
    ]
    assert len(set(runs[0])) == len(_SEEDS)
    assert runs[0] == runs[1]


def test_trace_does_not_depend_on_what_ran_before() -> None:
    """A seed run after others, in the same process, gives the trace that it gives first."""
    first = run_scenario(make_scenario(16)).trace_hash
    run_scenario(make_scenario(3))
    assert run_scenario(make_scenario(16)).trace_hash == first
