"""What the first and the second signal do to a process, and what the parent's death adds to them."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, sys
from kvferry_service.run import StopSignal, run

async def main(stop: StopSignal) -> int:
    if sys.argv[1] == "parent":
        stop.set("the parent is gone")
    print("up", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    return 0

sys.exit(run(main))
"""


def start(how: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_in_order(number: signal.Signals) -> None:
    """The main coroutine goes on to its own end and its status is the process's."""
    with start("alone") as process:
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping\n"
        process.communicate("end\n", timeout=10)
        assert process.returncode == 0


def test_a_second_signal_ends_at_once() -> None:
    """A process that hangs in its ordered end can be ended."""
    with start("alone") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


def test_the_signal_of_a_parent_that_goes_is_the_first() -> None:
    """A parent closes its pipe and then sends SIGTERM: the end stays an ordered one."""
    with start("parent") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)
        process.communicate("end\n", timeout=10)
        assert process.returncode == 0
