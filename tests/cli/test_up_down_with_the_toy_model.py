"""`kvferry up`, `ps`, `chat` and `down` as a user types them, over real engines with the toy model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

WAIT_S = 90.0

MANIFEST = """\
apiVersion: serving.kvferry.dev/v1alpha1
kind: InferenceService
metadata: {name: NAME}
spec:
  model: {name: toy, source: toy}
  engine: {kvBlocks: 128, maxModelLen: 1024, threads: 1}
  prefill: {replicas: 1}
  decode: {replicas: 1}
  router: {auth: none, disaggregation: {mode: always}}
"""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


class Service:
    """One manifest in a folder of its own, and the commands about it."""

    def __init__(self, folder: Path, name: str = "toy", text: str = MANIFEST) -> None:
        folder.mkdir()
        self.state = folder / ".kvferry" / name
        self.manifest = folder / "service.yaml"
        self.manifest.write_text(text.replace("NAME", name))
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "xdg"), "OMP_NUM_THREADS": "1"}

    def kvferry(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", "kvferry_cli", *arguments]
        result = subprocess.run(
            command, env=self.env, cwd=self.manifest.parent, capture_output=True, text=True, timeout=300, check=False
        )
        assert not check or result.returncode == 0, result.stdout + result.stderr + self.log()
        return result

    def up(self) -> None:
        self.kvferry("up", str(self.manifest), "--port", "0", "--detach", "--wait", "240")

    def log(self) -> str:
        file = self.state / "logs" / "launcher.log"
        return file.read_text() if file.exists() else ""

    def ps(self) -> dict[str, dict[str, object]]:
        listed = json.loads(self.kvferry("ps", "--json").stdout)
        return {process["name"]: process for process in listed["processes"]}

    def family(self) -> list[psutil.Process]:
        launcher = psutil.Process(json.loads(self.kvferry("ps", "--json").stdout)["pid"])
        return [launcher, *launcher.children(recursive=True)]

    def ask(self, text: str) -> str:
        answer = self.kvferry("chat", "--message", text, "--max-tokens", "8", "--temperature", "0", "--verbose")
        assert answer.stderr.startswith("[disaggregated, "), answer.stderr
        return answer.stdout


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(name: str = "toy", text: str = MANIFEST) -> Service:
        made.append(Service(tmp_path / f"{name}-{len(made)}", name, text))
        return made[-1]

    yield make
    for service in made:
        service.kvferry("down", "--wait", "20", check=False)


def gone(processes: list[psutil.Process]) -> bool:
    return not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_a_service_comes_up_answers_survives_a_killed_pod_and_goes_down(services: Callable[..., Service]) -> None:
    """A whole life: up, ps, a second up refused, chat, a pod killed and restarted, down, nothing left."""
    service = services()
    service.up()
    before = service.ps()
    assert {name: (process["role"], process["state"], process["restarts"]) for name, process in before.items()} == {
        "prefill-0": ("prefill", "ready", 0),
        "decode-0": ("decode", "ready", 0),
        "router": ("router", "ready", 0),
    }
    assert set(before["decode-0"]["ports"]) == {"http", "control", "data", "state"}  # type: ignore[call-overload]  # JSON
    table = service.kvferry("ps").stdout
    assert table.splitlines()[0].startswith("toy: ready, http://127.0.0.1:")
    assert table.splitlines()[1].split() == ["NAME", "ROLE", "PID", "PORTS", "STATE", "RESTARTS"]

    refused = service.kvferry("up", str(service.manifest), "--detach", check=False)
    assert refused.returncode == 1
    assert "service 'toy' (pid " in refused.stderr
    assert "already runs from" in refused.stderr

    first = service.ask("Where do ferries go at night?")
    os.kill(int(str(before["decode-0"]["pid"])), signal.SIGKILL)
    wait_until(lambda: service.ps()["decode-0"]["restarts"] == 1, "the restart to be counted")
    wait_until(lambda: service.ps()["decode-0"]["state"] == "ready", "the pod to come back")
    after = service.ps()["decode-0"]
    assert after["pid"] != before["decode-0"]["pid"]
    assert after["ports"] == before["decode-0"]["ports"]
    assert service.ask("Where do ferries go at night?") == first

    family = service.family()
    service.kvferry("down")
    assert gone(family)
    assert service.kvferry("ps", check=False).returncode == 3
    service.kvferry("down")
    log = service.log()
    assert log.index("router stopped") < log.index("decode-0 stopped") < log.index("prefill-0 stopped")


def test_kill_9_of_the_launcher_leaves_nothing_and_the_folder_can_be_used_again(
    services: Callable[..., Service],
) -> None:
    """Every process of the service ends by itself; the next `up` has the same ports and keys."""
    service = services()
    service.up()
    ports = {name: process["ports"] for name, process in service.ps().items()}
    family = service.family()
    family[0].kill()
    wait_until(lambda: gone(family), "all processes to end", 30.0)
    assert service.kvferry("ps", check=False).returncode == 3
    service.up()
    assert {name: process["ports"] for name, process in service.ps().items()} == ports
    service.kvferry("down")


def test_of_several_ups_at_once_exactly_one_serves(services: Callable[..., Service]) -> None:
    """Four start in one new folder in the same moment: three are refused with who has it, and harm nothing of the one.

    Its keys, ports and processes are its own: it answers, and after its end nothing of any of them is left.
    """
    service = services()
    command = [sys.executable, "-P", "-m", "kvferry_cli", "up", str(service.manifest), "--port", "0"]
    ups = [
        subprocess.Popen(
            command, env=service.env, cwd=service.manifest.parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    try:
        wait_until(lambda: sum(up.poll() is not None for up in ups) == 3, "three of four to be refused")
        (winner,) = [up for up in ups if up.poll() is None]
        for up in ups:
            if up is not winner:
                assert up.stderr is not None
                told = up.stderr.read().decode()
                assert (up.returncode, "already runs from" in told) == (1, True), told
                assert "Traceback" not in told
        wait_until(
            lambda: {process["state"] for process in service.ps().values()} == {"ready"}, "the one to be ready", 200.0
        )
        family = service.family()
        assert family[0].pid == winner.pid
        assert service.ask("Who of you is it?")
        assert service.kvferry("down").returncode == 0
        assert winner.wait(20) == 0
        assert gone(family)
    finally:
        for up in ups:
            up.kill()
            up.communicate()


def test_two_services_run_side_by_side(services: Callable[..., Service]) -> None:
    """Other folders, other ports, other keys; stopping one leaves the other alone."""
    one, two = services("one"), services("two")
    one.up()
    two.up()
    used = [set(process["ports"].values()) for service in (one, two) for process in service.ps().values()]  # type: ignore[attr-defined]  # JSON
    assert len(set.union(*used)) == sum(len(ports) for ports in used)
    keys = [(service.state / "keys" / "all" / "http").read_text() for service in (one, two)]
    assert keys[0] != keys[1]
    assert not (one.state / "keys" / "router" / "kv").exists()
    one.kvferry("down")
    assert two.ask("Still there?")
    two.kvferry("down")


def test_ctrl_c_while_starting_stops_everything(services: Callable[..., Service]) -> None:
    """The first signal is enough, also before anything is ready."""
    service = services()
    command = [sys.executable, "-P", "-m", "kvferry_cli", "up", str(service.manifest), "--port", "0"]
    with subprocess.Popen(
        command, env=service.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True
    ) as process:
        assert process.stdout is not None
        state = service.state / "state.json"
        wait_until(lambda: state.exists() and '"pid"' in state.read_text() and "prefill-0" in state.read_text(), "pods")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
        assert process.wait(60) == 0, output
    assert "SIGINT: stopping" in output
    wait_until(lambda: gone(family), "all processes to end", 10.0)
    assert not state.exists()


def test_detach_fails_with_the_launchers_own_words_and_leaves_nothing(services: Callable[..., Service]) -> None:
    """What the background process finds is on the terminal of the command that started it; no pod was needed."""
    service = services(text=MANIFEST.replace("source: toy", "source: 'toy:vocab=3'"))
    result = service.kvferry("up", str(service.manifest), "--port", "0", "--detach", "--wait", "240", check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("kvferry: spec.model.source: ")
    assert "vocab" in result.stderr
    assert "ready within" not in result.stderr
    assert service.kvferry("ps", check=False).returncode == 3
