"""A router's process on this machine, whose pods a test names by a file."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import wait_for

STOP_S = 20.0


class RouterProcess:
    """A running router."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self.process = process
        self._folder = folder
        self._killed = False
        self.url = f"http://127.0.0.1:{json.loads((folder / 'ready').read_text())['port']}"

    def name_pods(self, **pods: Mapping[str, Any]) -> None:
        """Name all pods there are: by name, each with its role and what its own ready file says of its ports."""
        entries = [
            {"name": name, "role": pod["role"], "host": "127.0.0.1", "http": pod["http"], "state": pod["state"]}
            for name, pod in pods.items()
        ]
        write_pods(self._folder, entries)

    def kill(self) -> None:
        """Let it die at once, which is no bad end then."""
        self._killed = True
        self.process.kill()

    def ended_well(self, status: int) -> bool:
        return status == (-signal.SIGKILL if self._killed else 0)

    def sockets(self) -> set[tuple[str, int]]:
        """Every address on which it listens."""
        found = psutil.Process(self.process.pid).net_connections("inet")
        return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def write_pods(folder: Path, entries: list[dict[str, Any]]) -> None:
    draft = folder / ".pods"
    draft.write_text(json.dumps({"pods": entries}))
    draft.replace(folder / "pods.json")


@contextmanager
def running_router(folder: Path, keys: Path, *flags: str) -> Iterator[RouterProcess]:
    """Start one without any pod; its model is called ``toy`` and anybody may ask. Afterwards it must end well."""
    folder.mkdir(parents=True, exist_ok=True)
    write_pods(folder, [])
    command = [sys.executable, "-P", "-m", "kvferry_router", "--service-name", "tested", "--model-name", "toy"]
    command += ["--pods-file", str(folder / "pods.json"), "--keys-dir", str(keys), "--auth", "none", "--port", "0"]
    command += ["--ready-file", str(folder / "ready"), *flags]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        ready = folder / "ready"
        try:
            wait_for(lambda: ready.exists() or process.poll() is not None, "the router to listen")
            assert process.poll() is None, (folder / "log").read_text()
            router = RouterProcess(process, folder)
            yield router
        finally:
            process.terminate()
            status = process.wait(STOP_S)
    assert router.ended_well(status), (folder / "log").read_text()
