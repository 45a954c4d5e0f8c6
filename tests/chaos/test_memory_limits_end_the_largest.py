"""A pod whose memory limit is reached: the kernel ends its largest process, and nothing else."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import cgroups, namespaces
from tests.chaos.cgroups import MemoryGroup, remove, why_not
from tests.support.waiting import wait_for

pytestmark = pytest.mark.processes

IDENTITY = "kvfctested"
HOLDS = "import sys, time; held = b'x' * (int(sys.argv[1]) << 20); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    if reason := why_not():
        pytest.skip(reason)
    made = MemoryGroup(IDENTITY, "pod")
    yield made
    if made.folder.exists():
        assert remove(IDENTITY) == [f"{IDENTITY}-pod"]


def held(group: MemoryGroup, mbytes: int) -> "subprocess.Popen[bytes]":
    """A process in the group that holds so much."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(mbytes)], stdout=subprocess.PIPE)
    group.take(process.pid)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    process.stdout.close()
    return process


async def test_the_largest_is_ended_and_the_limit_lifted(group: MemoryGroup) -> None:
    """By SIGKILL; the smaller one lives, and may have more memory afterwards than it had before."""
    large, small = held(group, 120), held(group, 10)
    try:
        assert await group.exhaust()
        assert await asyncio.to_thread(large.wait, 10) == -signal.SIGKILL
        assert group.kills() == 1
        other = held(group, 200)
        other.kill()
        other.wait()
        assert small.poll() is None
    finally:
        for process in (large, small):
            process.kill()
            process.wait()


async def test_it_says_when_nothing_was_ended(group: MemoryGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing is in the group but what the kernel may not end."""
    monkeypatch.setattr(cgroups, "PATIENCE_S", 2.0)
    monkeypatch.setattr(cgroups, "_FILLER", "print('ready', flush=True); input(); input()")
    assert not await group.exhaust()


def test_the_groups_of_a_killed_run_go_with_its_namespaces(group: MemoryGroup) -> None:
    """The sweep of the next run ends what is in them and removes them."""
    if reason := namespaces.why_not():
        pytest.skip(reason)
    namespaces.LOCKS.mkdir(mode=0o700, exist_ok=True)
    (namespaces.LOCKS / IDENTITY).touch()
    process = held(group, 1)
    assert f"{IDENTITY}-pod" in namespaces.sweep()
    assert process.wait(10) == -signal.SIGKILL
    wait_for(lambda: not Path(group.folder).exists(), "the group to go", 5)
