"""A pod that was given cores runs on them alone, and the launcher's own stay as they were."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kvferry_cli.local.pod import LocalPod
from kvferry_cli.local.process import PodProcess

SHOW = "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin processes")


async def cores_of_a_pod(cores: tuple[int, ...], folder: Path) -> str:
    """What a pod's process says of its cores."""
    lines: list[str] = []
    ended = asyncio.Event()
    pod = LocalPod(
        name="decode-0", role="decode", argv=(sys.executable, "-P", "-c", SHOW), env={}, ports={}, cores=cores
    )
    PodProcess(pod, folder, lines.append, lambda why, code: ended.set())
    await asyncio.wait_for(ended.wait(), 30)
    return lines[0]


@pytest.mark.parametrize("chosen", [0, -1])
async def test_a_pinned_pod_has_the_cores_it_was_given(tmp_path: Path, chosen: int) -> None:
    """From its first instruction on; the launcher may use all of its own still."""
    own = sorted(os.sched_getaffinity(0))
    core = own[chosen]
    assert await cores_of_a_pod((core,), tmp_path) == f"[{core}]"
    assert sorted(os.sched_getaffinity(0)) == own


async def test_without_cores_a_pod_has_its_launchers(tmp_path: Path) -> None:
    """`kvferry up` pins nothing."""
    assert await cores_of_a_pod((), tmp_path) == str(sorted(os.sched_getaffinity(0)))


async def test_a_core_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """The launcher tells it as a pod that could not be started; its own cores are untouched."""
    own = os.sched_getaffinity(0)
    with pytest.raises(OSError, match="Invalid argument"):
        await cores_of_a_pod((4000,), tmp_path)
    assert os.sched_getaffinity(0) == own
