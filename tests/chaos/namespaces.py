"""Network namespaces of one run: a switch, and one for each pod and for the clients, with links that can be harmed.

Each node's cable ends in the switch's namespace. What shall not reach a node is dropped there by a classic BPF
program (`tc ... bpf`), what is to be slow waits there in an HTB class; netem, nft and iptables are not needed. Nothing
outside of these namespaces is touched, so that runs do not meet each other and can have the same addresses.

A run holds a lock. The next run removes namespaces of runs whose lock is free, with the processes in them.
"""

import asyncio
import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.chaos import cgroups

PREFIX = "kvfc"
LOCKS = Path("/run/kvferry-chaos")
SWITCH = "switch"
OBSERVER = "observer"  # where the harness itself looks on from; no link to it is ever harmed
MAX_NODES = 32
COMMAND_S = 20.0
HOW = "run it as root on Linux with iproute2, veth, bridge, sch_htb, sch_ingress, cls_bpf and cls_u32"

_CLONE_NEWNET = 0x40000000
_DROP, _GO_ON = 2, 0xFFFFFFFF  # TC_ACT_SHOT, TC_ACT_UNSPEC
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_SOURCE_ADDRESS = 14 + 12  # Ethernet header, then the offset in the IPv4 header


class NamespaceError(RuntimeError):
    """A namespace or link cannot be made or changed; the message is what the tool said."""


class LinkRule(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to packets from one node to another. ``source`` "" is every node but the observer."""

    source: str
    target: str
    lost: float = 1.0  # share of the packets
    bytes_per_s: float = 0.0  # if not 0, nothing is lost, and this much passes


def program(rules: Sequence[tuple[int | None, float]], spared: Iterable[int]) -> str:
    """Classic BPF for ``tc``: drops shares of what comes from IPv4 addresses.

    Args:
        rules: source address (``None``: any) and the share of its packets that is lost.
        spared: addresses from which everything passes.
    """
    lines: list[tuple[int, int, int, int]] = []
    for address in spared:
        lines += [(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS), (_JUMP_EQUAL, 0, 1, address), (_RETURN, 0, 0, _GO_ON)]
    for source, lost in rules:
        block: list[tuple[int, int, int, int]] = [(_RETURN, 0, 0, _DROP)]
        if lost < 1:
            block = [(_LOAD_WORD, 0, 0, _RANDOM), (_JUMP_AT_LEAST, len(block), 0, int(lost * 2**32)), *block]
        if source is not None:
            block = [(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS), (_JUMP_EQUAL, 0, len(block), source), *block]
        lines += block
    lines.append((_RETURN, 0, 0, _GO_ON))
    return ",".join([str(len(lines)), *(" ".join(map(str, line)) for line in lines)]) + ","


def number_of(address: str) -> int:
    """An IPv4 address as a number."""
    return int.from_bytes(bytes(map(int, address.split("."))), "big")


class Network:
    """The namespaces of one run: ``with Network(nodes) as network``.

    Args:
        nodes: their names; each gets an address.
        joined: nodes between which no link is ever harmed, because they are one pod.
    """

    def __init__(self, nodes: Sequence[str], joined: Sequence[tuple[str, str]] = ()) -> None:
        assert len(nodes) < MAX_NODES, f"{len(nodes)} nodes; {MAX_NODES - 1} are allowed"
        self._id = f"{PREFIX}{secrets.token_hex(3)}"
        self._nodes = [OBSERVER, *nodes]
        self._joined = {frozenset(pair) for pair in joined}
        self._ports: dict[str, tuple[str, ...]] = dict.fromkeys(self._nodes, ())  # tc lines in force, by node
        self._changing = asyncio.Lock()

    def __enter__(self) -> "Network":
        LOCKS.mkdir(mode=0o700, exist_ok=True)
        self._lock = (LOCKS / self._id).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        remove(self._id)
        self._lock.close()

    def _make(self) -> None:
        switch = self.namespace(SWITCH)
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for node in self._nodes:
            own, port = self.namespace(node), self._port(node)
            run("ip", "netns", "add", own)
            lines = [
                f"link add name {port} type veth peer name eth0 netns {own}",
                f"link set {port} master bridge",
                f"link set {port} up",
            ]
            run("ip", "-n", switch, "-batch", "-", given="\n".join(lines))
            lines = [
                "link set lo up",
                "link set eth0 gso_max_size 8192",  # a slow link is to be slow for each packet
                f"addr add {self.address(node)}/24 dev eth0",
                "link set eth0 up",
            ]
            run("ip", "-n", own, "-batch", "-", given="\n".join(lines))
            run("tc", "-n", switch, "qdisc", "add", "dev", port, "clsact")

    @property
    def identity(self) -> str:
        """Of the run: the beginning of the names of all that it makes."""
        return self._id

    def namespace(self, node: str) -> str:
        return f"{self._id}-{node}"

    def address(self, node: str) -> str:
        return f"10.77.0.{self._nodes.index(node) + 1}"

    def _port(self, node: str) -> str:
        return f"port{self._nodes.index(node)}"

    def inside(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs another one in a node's namespace; it becomes that process, with its pid."""
        return ["ip", "netns", "exec", self.namespace(node), *argv]

    async def apply(self, rules: Iterable[LinkRule]) -> None:
        """These rules and no others from now on."""
        async with self._changing:
            wanted = {node: self._port_lines(node, tuple(rules)) for node in self._nodes}
            lines: list[str] = []
            for node, new in wanted.items():
                if new != (old := self._ports[node]):
                    lines += self._clearing(node, old) + list(new)
            if lines:
                await asyncio.to_thread(run, "tc", "-n", self.namespace(SWITCH), "-batch", "-", given="\n".join(lines))
            self._ports = wanted

    def _clearing(self, node: str, lines: Sequence[str]) -> list[str]:
        port = self._port(node)
        cleared = [f"filter del dev {port} egress"] if any(" egress " in line for line in lines) else []
        return cleared + ([f"qdisc del dev {port} root"] if any(line.startswith("qdisc") for line in lines) else [])

    def _port_lines(self, node: str, rules: Sequence[LinkRule]) -> tuple[str, ...]:
        """What makes a node's port do what the rules say, from a port that does nothing."""
        if node == OBSERVER:
            return ()
        port = self._port(node)
        losses: list[tuple[int | None, float]] = []
        rates: list[tuple[str, float]] = []
        for rule in rules:
            if rule.target in ("", node) and rule.source != node:
                if rule.bytes_per_s:
                    rates.append((self.address(rule.source), rule.bytes_per_s))
                else:
                    losses.append((number_of(self.address(rule.source)) if rule.source else None, rule.lost))
        lines = []
        if losses:
            others = [other for other in self._nodes if frozenset((node, other)) in self._joined]
            spared = [number_of(self.address(other)) for other in (OBSERVER, *others)]
            lines.append(f'filter add dev {port} egress protocol ip bpf da bytecode "{program(losses, spared)}"')
        if rates:
            lines.append(f"qdisc add dev {port} root handle 1: htb default 1")
            lines.append(f"class add dev {port} parent 1: classid 1:1 htb rate 10gbit quantum 60000")
            for number, (address, rate) in enumerate(rates, 2):
                limit = f"rate {int(rate * 8)}bit burst 2k quantum 9000"
                lines.append(f"class add dev {port} parent 1: classid 1:{number} htb {limit}")
                lines.append(
                    f"filter add dev {port} parent 1: protocol ip u32 match ip src {address} flowid 1:{number}"
                )
        return tuple(lines)

    @contextmanager
    def within(self, node: str) -> Iterator[None]:
        """Sockets that this thread makes meanwhile, and processes that it starts, are a node's."""
        with Path("/proc/thread-self/ns/net").open() as before, Path("/run/netns", self.namespace(node)).open() as own:
            _enter(own.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        raise NamespaceError(f"setns: {os.strerror(ctypes.get_errno())}")


def run(*argv: str, given: str = "", env: Mapping[str, str] | None = None) -> str:
    """Run a command to its end. Raises ``NamespaceError`` with what it said."""
    try:
        done = subprocess.run(
            argv, input=given, capture_output=True, text=True, timeout=COMMAND_S, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NamespaceError(f"{' '.join(argv)}: {error}") from error
    if done.returncode:
        raise NamespaceError(f"{' '.join(argv)}: {done.stderr.strip()}\n{given}".strip())
    return done.stdout


def remove(identity: str) -> list[str]:
    """End every process in the namespaces and memory groups of a run and delete them; returns their names."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.startswith(f"{identity}-")]
    for name in names:
        for pid in run("ip", "netns", "pids", name).split():
            if int(pid) != os.getpid():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it has ended meanwhile
    for name in names:
        run("ip", "netns", "del", name)
    names += cgroups.remove(identity)
    (LOCKS / identity).unlink(missing_ok=True)
    return names


def sweep() -> list[str]:
    """Remove what runs that are no more have left; returns the names of the namespaces."""
    left: list[str] = []
    for lock in LOCKS.glob(f"{PREFIX}*") if LOCKS.is_dir() else ():
        with lock.open("w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # that run goes on
            left += remove(lock.name)
    return left


def why_not() -> str:
    """Why namespaces with links that can be harmed cannot be had here, and how they could; empty if they can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's: {HOW}"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: {HOW}"
    if os.geteuid():
        return f"network namespaces need root: {HOW}"
    try:
        with Network(["a", "b"]) as network:
            rules = [LinkRule(source="a", target="b", lost=0.5), LinkRule(source="b", target="a", bytes_per_s=1000)]
            asyncio.run(network.apply(rules))
    except (NamespaceError, OSError) as error:
        return f"{error}: {HOW}"
    return ""


if __name__ == "__main__":
    began = time.monotonic()
    print(f"removed: {', '.join(sweep()) or 'nothing'}; {why_not() or 'namespaces can be had here'}")
    print(f"{time.monotonic() - began:.1f} s")
