"""The network of a chaos run harms the packets it is told to, only those, and leaves nothing behind."""

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.chaos import namespaces
from tests.chaos.namespaces import OBSERVER, LinkRule, Network, program, run, sweep, why_not

pytestmark = pytest.mark.processes

PACKETS = 400
PORT = 4000


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    with Network(["one", "two", "three"], joined=[("two", "three")]) as made:
        yield made


def arrived(network: Network, source: str, target: str) -> int:
    """How many of ``PACKETS`` datagrams reach a node."""
    with network.within(target):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with network.within(source):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with receiver, sender:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        receiver.bind((network.address(target), PORT))
        for _ in range(PACKETS):
            sender.sendto(b"x", (network.address(target), PORT))
        receiver.settimeout(0.3)
        count = 0
        try:
            while count < PACKETS:
                receiver.recv(10)
                count += 1
        except TimeoutError:
            pass  # no more of them arrive
    return count


async def test_a_one_way_cut_stops_one_direction(network: Network) -> None:
    """Nothing from one to two; everything back, and between others; all is well again without the rule."""
    await network.apply([LinkRule(source="one", target="two")])
    found = [arrived(network, *pair) for pair in (("one", "two"), ("two", "one"), ("one", "three"), ("three", "two"))]
    assert found == [0, PACKETS, PACKETS, PACKETS]
    await network.apply([])
    assert arrived(network, "one", "two") == PACKETS


async def test_loss_takes_its_share_on_every_link_but_the_harness_own(network: Network) -> None:
    """A fifth of all packets; none between the two halves of a pod, none of the observer's."""
    await network.apply([LinkRule(source="", target="", lost=0.2)])
    assert 0.7 * PACKETS < arrived(network, "one", "two") < 0.9 * PACKETS
    assert arrived(network, "two", "three") == PACKETS
    assert arrived(network, OBSERVER, "two") == arrived(network, "two", OBSERVER) == PACKETS
    await network.apply([])


async def test_a_throttled_link_is_slow_in_one_direction(network: Network) -> None:
    """10 KB at 5 KB/s take more than a second; the way back, and other nodes, are as fast as ever."""
    await network.apply([LinkRule(source="one", target="two", bytes_per_s=5000)])
    assert _seconds(network, "one", "two", 10_000) > 1.0
    assert max(_seconds(network, "two", "one", 10_000), _seconds(network, "three", "two", 10_000)) < 0.5
    await network.apply([])
    assert _seconds(network, "one", "two", 10_000) < 0.5


def _seconds(network: Network, source: str, target: str, size: int) -> float:
    """That so many bytes take over a new connection."""
    with network.within(target):
        listener = socket.create_server((network.address(target), 0))
    with network.within(source):
        sender = socket.create_connection(listener.getsockname(), 10)
    receiver, _ = listener.accept()
    listener.close()
    with sender, receiver:
        receiver.settimeout(20)
        began, got = time.monotonic(), 0
        sender.sendall(bytes(size))
        while got < size:
            got += len(receiver.recv(65536))
        return time.monotonic() - began


def test_a_program_names_what_it_drops() -> None:
    """The bytes that the kernel is given: length first, an address tested before a share is drawn."""
    assert program([(None, 1.0)], []) == "2,6 0 0 2,6 0 0 4294967295,"
    assert program([(1, 0.5)], []) == (
        "6,32 0 0 26,21 0 3 1,32 0 0 4294963256,53 1 0 2147483648,6 0 0 2,6 0 0 4294967295,"
    )


def test_a_killed_run_is_cleared_by_the_next(network: Network) -> None:
    """SIGKILL of a harness: its namespaces and the processes in them go with the next sweep, a living run's stay."""
    code = (
        "import subprocess, sys, time; from tests.chaos.namespaces import Network\n"
        "with Network(['left']) as network:\n"
        "    child = subprocess.Popen(network.inside('left', ['sleep', '600']), stdout=subprocess.DEVNULL)\n"
        "    print(network.namespace('left'), child.pid, flush=True); time.sleep(600)"
    )
    harness = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert harness.stdout is not None
    name, pid = harness.stdout.readline().split()
    assert name not in sweep()
    harness.kill()
    harness.wait(10)
    harness.stdout.close()
    assert name in run("ip", "netns", "list")
    assert name in sweep()
    listed = run("ip", "netns", "list")
    assert name not in listed
    assert network.namespace("one") in listed
    deadline = time.monotonic() + 5
    while _runs(int(pid)):
        assert time.monotonic() < deadline, "the process is left"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe") != ""
    except OSError:  # gone, or a zombie without a program
        return False


def test_where_it_cannot_be_had_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, and without the tools: the reason and the way."""
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert "need root: run it as root" in why_not() or "not found" in why_not()
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == "tc" else name)
    assert why_not().startswith("tc not found: run it as root on Linux with iproute2")


def test_the_lock_of_a_run_is_not_inherited(network: Network) -> None:
    """Else what a killed harness leaves behind would keep its own namespaces alive."""
    lock = network._lock
    assert not os.get_inheritable(lock.fileno())
    with (namespaces.LOCKS / network._id).open("w") as second, pytest.raises(BlockingIOError):
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
