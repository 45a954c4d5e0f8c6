"""The operator as a process of its own, started as the chart's Deployment starts it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import psutil

from tests.apiserver.operator.install import Installation
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[3]
START_S = 60.0
_SAMPLE = re.compile(r"(?P<name>[a-z_:]+)(\{(?P<labels>.*)\})? (?P<value>\S+)")


class OperatorProcess:
    """One process. ``kubeconfig`` may lead through something that stands between it and the server."""

    alive: ClassVar[list["OperatorProcess"]] = []  # whose logs a failing test shows

    def __init__(self, installation: Installation, name: str = "operator", kubeconfig: Path | None = None) -> None:
        self.installation = installation
        self.name = name
        self.port = free_port()
        self.log_path = installation.folder / f"{name}-{self.port}.log"
        where = (
            ["--all-namespaces"] if installation.clusterwide else [f"--namespaces={','.join(installation.namespaces)}"]
        )
        command = [
            sys.executable, "-P", "-m", "kvferry_operator",
            f"--settings-file={installation.settings}", f"--lease-namespace={installation.release}",
            "--lease-name=kvferry-operator", f"--identity={name}", f"--port={self.port}", "--log-format=json", *where,
        ]  # fmt: skip
        env = {key: value for key, value in os.environ.items() if key not in ("KUBERNETES_SERVICE_HOST",)}
        env |= {"KUBECONFIG": str(kubeconfig or installation.kubeconfig), "HOME": str(installation.folder)}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=installation.folder
            )

        self.alive.append(self)

    # ---- what it says

    def ask(self, path: str) -> tuple[int, str]:
        """Status and body of an answer; 0 where there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metrics(self) -> dict[str, float]:
        """All samples, by name with labels."""
        return {
            f"{match['name']}{{{match['labels'] or ''}}}": float(match["value"])
            for line in self.ask("/metrics")[1].splitlines()
            if (match := _SAMPLE.fullmatch(line))
        }

    def calls(self, *, lease: bool = False) -> float:
        """Calls about objects so far but for lists and watches; those for the Lease are left out unless asked for."""
        return sum(
            value
            for name, value in self.metrics().items()
            if name.startswith("kvferry:operator_api_calls_total")
            and 'kind=""' not in name  # the look for the CRDs at the start
            and (lease or 'kind="Lease"' not in name)
        )

    def leads(self) -> bool:
        return self.metrics().get("kvferry:operator_leader{}") == 1.0

    def lines(self) -> list[Mapping[str, object]]:
        """The log so far."""
        found = []
        for line in self.log_path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append({"message": line})
        return found

    def log(self) -> str:
        return self.log_path.read_text()[-4000:]

    def rss_mib(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used."""
        used = psutil.Process(self.process.pid).cpu_times()
        return float(used.user + used.system)

    # ---- life

    def await_leading(self, seconds: float = START_S) -> None:
        """Until it holds the Lease and has seen everything."""
        self._await(lambda: self.leads() and self.ask("/readyz")[0] == 200, "to lead and be ready", seconds)

    def await_ready(self, seconds: float = START_S) -> None:
        self._await(lambda: self.ask("/readyz")[0] == 200, "to be ready", seconds)

    def await_end(self, seconds: float = START_S) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        if self in self.alive:
            self.alive.remove(self)

    def _await(self, true: object, what: str, seconds: float) -> None:
        def check() -> object:
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self.log()}"
            return true()  # type: ignore[operator]

        try:
            wait_for(check, f"{self.name} {what}", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def close_all(processes: Sequence[OperatorProcess]) -> None:
    for process in processes:
        process.close()
