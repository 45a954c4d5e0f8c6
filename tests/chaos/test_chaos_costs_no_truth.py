"""Two minutes of chaos on real processes: nothing wrong, nothing hung, nothing leaked. ``make chaos`` runs ten.

``KVFERRY_CHAOS_SEED`` and ``KVFERRY_CHAOS_SECONDS`` replay another run; a failure tells its seed and its schedule.
"""

import os
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.namespaces import sweep, why_not
from tests.chaos.stages import run_judged

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

SEED = int(os.environ.get("KVFERRY_CHAOS_SEED", "20"))
SECONDS = float(os.environ.get("KVFERRY_CHAOS_SECONDS", "120"))


@pytest.fixture(scope="module")
def namespaces() -> None:
    """The reason to skip, where network namespaces cannot be had; what killed runs have left goes."""
    if reason := why_not():
        pytest.skip(reason)
    sweep()


def storm(name: str, folder: Path) -> None:
    """One stage; its report is printed, and is the message where something was found."""
    stage = run_judged(name, SEED, SECONDS, folder / name, print)
    told = report.as_text([stage], f"make chaos SEED={SEED} SECONDS={SECONDS:g}")
    print(told)
    assert not stage.findings, told


@pytest.mark.usefixtures("namespaces")
def test_toy_model(tmp_path: Path) -> None:
    """32 streaming clients, two routers, two prefill and two decode pods: every token is the oracle's."""
    storm("toy", tmp_path)


@pytest.mark.model
@pytest.mark.usefixtures("namespaces", "demo_model")
def test_real_model(tmp_path: Path) -> None:
    """Four clients of SmolLM2: every token of every answer, resumed ones too, is transformers' own."""
    storm("smollm2", tmp_path)
