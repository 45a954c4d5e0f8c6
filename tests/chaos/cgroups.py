"""Memory limits of pods: a cgroup for each, which a fault fills until the kernel ends the largest process in it.

That is what happens to a container that reaches its limit. The groups of a run are named like its namespaces and go
with them; nothing outside of them is limited. Both versions of cgroups will do.
"""

import asyncio
import os
import secrets
import signal
import sys
import time
from pathlib import Path

ROOM_BYTES = 4 * 2**20  # that a group has left when its filling begins
PATIENCE_S = 20.0  # until the kernel has to have ended a process
LOOK_S = 0.005
GONE_S = 5.0  # that processes of a group may take to end
HOW = "run it as root on Linux, with a memory controller of cgroups that groups can be made in"

# Takes a MiB a millisecond once it is told to: slow enough to be stopped after the first kill.
_FILLER = """
import mmap, sys, time
print("ready", flush=True)
sys.stdin.readline()
taken = []
while True:
    taken.append(mmap.mmap(-1, 2**20))
    taken[-1].write(b"x" * 2**20)
    time.sleep(0.001)
"""


class CgroupError(RuntimeError):
    """A group cannot be made or changed; the message says what failed."""


class MemoryGroup:
    """One group. ``pod`` and the identity of its run make its name."""

    def __init__(self, identity: str, pod: str) -> None:
        root, self._second = _controller()
        self.folder = root / f"{identity}-{pod}"
        try:
            self.folder.mkdir(exist_ok=True)
            swap, never = ("memory.swap.max", "0") if self._second else ("memory.swappiness", "0")
            if (self.folder / swap).exists():
                self._write(swap, never)
        except OSError as error:
            raise CgroupError(f"{self.folder}: {error.strerror}") from error

    def take(self, pid: int) -> None:
        """This process, and what it will start, are in the group from now on. Call it before it has memory."""
        self._write("cgroup.procs", str(pid))

    def kills(self) -> int:
        """How many processes in it the kernel has ended for want of memory."""
        text = (self.folder / ("memory.events" if self._second else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    async def exhaust(self) -> bool:
        """Fill the group until the kernel ends its largest process, and lift the limit. Whether it has ended one."""
        before = self.kills()
        filler = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _FILLER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert filler.stdin is not None and filler.stdout is not None
        try:
            await asyncio.wait_for(filler.stdout.readline(), PATIENCE_S)
            self.take(filler.pid)
            usage = int((self.folder / ("memory.current" if self._second else "memory.usage_in_bytes")).read_text())
            self._limit(str(usage + ROOM_BYTES))
            filler.stdin.write(b"\n")
            deadline = time.monotonic() + PATIENCE_S
            while self.kills() == before and time.monotonic() < deadline:  # noqa: ASYNC110 - the kernel's doing
                await asyncio.sleep(LOOK_S)
            return self.kills() > before and filler.returncode is None
        finally:
            self._limit("max" if self._second else "-1")
            if filler.returncode is None:
                filler.kill()
            await filler.wait()

    def _limit(self, value: str) -> None:
        self._write("memory.max" if self._second else "memory.limit_in_bytes", value)

    def _write(self, name: str, value: str) -> None:
        (self.folder / name).write_text(value)


def _controller() -> tuple[Path, bool]:
    """The root of the groups whose memory can be limited, and whether it is of version 2."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(folder), False
        if kind == "cgroup2" and "memory" in (Path(folder) / "cgroup.subtree_control").read_text().split():
            return Path(folder), True
    raise CgroupError("no memory controller for groups of our own is mounted")


def remove(identity: str) -> list[str]:
    """End every process in the groups of a run and remove them; returns their names."""
    try:
        root, _ = _controller()
    except (CgroupError, OSError):  # then there is none
        return []
    deadline = time.monotonic() + GONE_S
    removed = []
    for group in sorted(root.glob(f"{identity}-*")):
        while (pids := (group / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it has ended meanwhile
            time.sleep(LOOK_S)
        group.rmdir()
        removed.append(group.name)
    return removed


def why_not() -> str:
    """Why memory cannot be limited here, and how it could; empty if it can."""
    if sys.platform != "linux":
        return f"cgroups are Linux's: {HOW}"
    if os.geteuid():
        return f"limiting memory needs root: {HOW}"
    identity = f"kvfc{secrets.token_hex(3)}"
    try:
        group = MemoryGroup(identity, "tried")
        group.kills()
        remove(identity)
    except (CgroupError, OSError) as error:
        return f"{error}: {HOW}"
    return ""
