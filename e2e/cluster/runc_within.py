#!/usr/bin/env python3
"""runc for a root that does not hold every capability.

Such a root may start containers, but not with capabilities that it lacks, a lower OOM score, or higher limits than its
own; runc fails on the first of them. This takes them out of what runc is asked for, then becomes runc. It is set as
Docker's runtime where it is needed.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

RUNC_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# In the kernel's order: the number of a capability is its place.
CAPABILITIES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
    NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
    SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
    MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
""".split()  # noqa: SIM905 - a list of quoted words would be three times as long


def held_capabilities() -> set[str]:
    """What this process could give to a child."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    bounding = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapBnd:"))
    return {f"CAP_{name}" for number, name in enumerate(CAPABILITIES) if bounding >> number & 1}


def reduce_process(process: dict[str, Any]) -> None:
    """Take out of an OCI process what this one may not give."""
    held = held_capabilities()
    sets = process.get("capabilities") or {}
    for name, capabilities in sets.items():
        sets[name] = [capability for capability in capabilities or [] if capability in held]
    if process.get("oomScoreAdj") is not None:
        lowest = int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))
        process["oomScoreAdj"] = max(process["oomScoreAdj"], lowest)
    for limit in process.get("rlimits") or []:
        hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if hard != resource.RLIM_INFINITY:
            limit["hard"] = min(limit["hard"], hard)
            limit["soft"] = min(limit["soft"], limit["hard"])


def edit(path: Path, *, whole: bool) -> None:
    """Reduce the process in a file: the whole of it, or the ``process`` of a bundle's configuration."""
    document = json.loads(path.read_text(encoding="utf-8"))
    reduce_process(document if whole else document["process"])
    path.write_text(json.dumps(document), encoding="utf-8")


def option(arguments: list[str], name: str) -> str | None:
    """The value of an option, as ``--name value`` or ``--name=value``."""
    for at, argument in enumerate(arguments):
        if argument == name and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def main(arguments: list[str]) -> None:
    """Edit what ``runc create``, ``run`` or ``exec`` will read, then become runc."""
    if "create" in arguments or "run" in arguments:
        edit(Path(option(arguments, "--bundle") or ".") / "config.json", whole=False)
    elif "exec" in arguments:
        process = option(arguments, "--process")
        if process is not None:
            edit(Path(process), whole=True)
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{RUNC_FOLDERS}"
    os.execvp("runc", ["runc", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
