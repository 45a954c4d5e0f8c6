"""Runs the launcher over fake pods, as ``kvferry up`` does over real ones. A script: STATE_DIR JSON.

The JSON maps pod names to extra arguments of ``fake_pod.py``; ports are chosen here, but for a pod whose first argument
is ``PORT=N``. ``STAYS=1`` in the environment: no pod may have another port.
"""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

from kvferry_cli.local.background import Reporter
from kvferry_cli.local.identity import own_identity
from kvferry_cli.local.launcher import Launcher
from kvferry_cli.local.logs import Screen
from kvferry_cli.local.pod import LocalPod
from kvferry_cli.local.state_dir import STATE_VERSION, ServiceRecord, StateDir
from kvferry_cli.local.supervisor import Policy

FAKE = str(Path(__file__).with_name("fake_pod.py"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_pod(name: str, extra: list[str], port: int) -> LocalPod:
    argv = (sys.executable, FAKE, "--name", name, "--port", str(port), *extra)
    return LocalPod(name=name, role=name.rpartition("-")[0] or name, argv=argv, env={}, ports={"http": port})


def main() -> int:
    state = StateDir(Path(sys.argv[1]))
    arguments = json.loads(sys.argv[2])
    pods = []
    for name, extra in arguments.items():
        given = int(extra.pop(0).removeprefix("PORT=")) if extra and extra[0].startswith("PORT=") else free_port()
        pods.append(make_pod(name, extra, given))

    def move(name: str) -> LocalPod:
        return make_pod(name, arguments[name], free_port())

    state.create()
    state.lock()
    record = ServiceRecord(
        version=STATE_VERSION,
        service="fake",
        model="fake",
        manifest="",
        revision="",
        endpoint="",
        auth="none",
        state="starting",
        launcher=own_identity(),
        pods=(),
    )
    screen = Screen([pod.name for pod in pods])
    policy = Policy(backoff_first_s=0.1, backoff_cap_s=0.4, grace_s=1.0)
    launcher = Launcher(
        tuple(pods),
        state,
        record,
        screen,
        policy,
        on_ready=lambda: screen.say(f"all ready at {launcher.record.endpoint}"),
        move=None if os.environ.get("STAYS") else move,
    )
    outcome = asyncio.run(launcher.run())
    screen.say(f"end: {outcome.failure or 'in order'}")
    screen.close()
    Reporter(None).ended("")
    return 0


if __name__ == "__main__":
    sys.exit(main())
