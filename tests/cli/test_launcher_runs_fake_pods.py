"""The launcher over small fake pods: real processes, signals, logs and state, without an engine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvferry_cli.local.state_dir import ServiceRecord, StateDir

DRIVER = str(Path(__file__).with_name("launch_fakes.py"))
WAIT_S = 20.0

pytestmark = pytest.mark.processes


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.02)


class Run:
    """A launcher in a process of its own."""

    def __init__(self, folder: Path, pods: dict[str, list[str]]) -> None:
        self.state = StateDir(folder / "state")
        self.output = folder / "output"
        command = [sys.executable, DRIVER, str(self.state.path), json.dumps(pods)]
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def record(self) -> ServiceRecord | None:
        return self.state.read_state()

    def pod_state(self, name: str) -> str:
        record = self.record()
        return next((pod.state for pod in record.pods if pod.name == name), "") if record else ""

    def pid(self, name: str) -> int:
        record = self.record()
        assert record is not None
        found = next(pod.process for pod in record.pods if pod.name == name)
        assert found is not None
        return found.pid

    def wait_ready(self) -> None:
        wait_until(lambda: (record := self.record()) is not None and record.state == "ready", "all pods")

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == 0, self.output.read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[dict[str, list[str]]], Run]]:
    runs: list[Run] = []

    def start(pods: dict[str, list[str]]) -> Run:
        runs.append(Run(tmp_path, pods))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            for process in run.family():
                process.kill()
            run.process.wait()


def gone(processes: list[psutil.Process]) -> bool:
    return not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


TRIO = {"prefill-0": [], "decode-0": [], "router": []}


def test_sigterm_stops_router_then_decode_then_prefill_and_leaves_nothing(
    launch: Callable[[dict[str, list[str]]], Run], tmp_path: Path
) -> None:
    """The order is kept, children of pods end too, and the launcher exits with 0."""
    log = tmp_path / "stopped"
    run = launch({name: ["--stop-log", str(log), "--child"] for name in TRIO})
    run.wait_ready()
    family = run.family()
    assert len(family) == 7
    run.stop()
    assert log.read_text().split() == ["router", "decode-0", "prefill-0"]
    assert gone(family)
    assert "end: in order" in run.output.read_text()


def test_a_pod_that_ignores_sigterm_is_killed_when_its_grace_is_over(
    launch: Callable[[dict[str, list[str]]], Run],
) -> None:
    """The stop goes on to the next tier."""
    run = launch(TRIO | {"decode-0": ["--ignore-term"]})
    run.wait_ready()
    family = run.family()
    run.stop()
    assert gone(family)
    assert "decode-0: killed: did not stop within 1 s" in run.output.read_text()


def test_a_second_signal_kills_at_once(launch: Callable[[dict[str, list[str]]], Run]) -> None:
    """Two times Ctrl-C waits for nobody."""
    run = launch({name: ["--ignore-term"] for name in TRIO})
    run.wait_ready()
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    wait_until(lambda: run.pod_state("router") == "stopping", "the first signal")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(WAIT_S) == 0
    assert gone(family)


def test_kill_9_of_the_launcher_leaves_no_pod(launch: Callable[[dict[str, list[str]]], Run]) -> None:
    """Pods watch the pipe that their launcher held."""
    run = launch(TRIO)
    run.wait_ready()
    family = run.family()
    run.process.kill()
    run.process.wait()
    wait_until(lambda: gone(family), "pods to end")
    assert not run.state.locked()


def test_a_killed_pod_comes_back_on_the_same_port_with_its_restart_counted(
    launch: Callable[[dict[str, list[str]]], Run],
) -> None:
    """Also its children go: a new process never meets those of the old one."""
    run = launch(TRIO | {"decode-0": ["--child"]})
    run.wait_ready()
    first = run.pid("decode-0")
    children = psutil.Process(first).children()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: run.pod_state("decode-0") != "ready", "the launcher to notice")
    run.wait_ready()
    record = run.record()
    assert record is not None
    pod = next(pod for pod in record.pods if pod.name == "decode-0")
    assert pod.restarts == 1
    assert pod.process is not None
    assert pod.process.pid != first
    assert children
    assert gone(children)
    assert "decode-0 ended: killed by SIGKILL" in run.output.read_text()
    run.stop()


def test_a_crash_loop_is_explained_with_the_last_lines_and_the_others_serve_on(
    launch: Callable[[dict[str, list[str]]], Run],
) -> None:
    """The launcher keeps trying, with growing delays, and says what the pod said."""
    run = launch(TRIO | {"decode-1": ["--exit-code", "3"]})
    wait_until(lambda: run.pod_state("router") == "ready", "the router")
    wait_until(lambda: run.output.read_text().count("decode-1 ended: exit status 3") >= 3, "three tries")
    text = run.output.read_text()
    assert "it starts again in 0.1 s; its last lines:" in text
    assert "it starts again in 0.4 s" in text
    assert "    broken decode-1" in text
    assert run.pod_state("decode-0") == "ready"
    run.stop()


def test_a_pod_that_can_never_work_ends_the_service_with_its_last_lines(
    launch: Callable[[dict[str, list[str]]], Run],
) -> None:
    """Exit status 2 is a pod's word for arguments and files at fault; it is not started a second time."""
    run = launch(TRIO | {"decode-1": ["--exit-code", "2"]})
    assert run.process.wait(WAIT_S) == 0
    text = run.output.read_text()
    assert "; another try would end alike; its last lines:" in text
    assert "end: decode-1 does not start: exit status 2" in text
    assert text.count("decode-1  | hello") == 1
    assert text.rstrip().endswith("    broken decode-1")


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_a_pod_whose_port_was_taken_listens_on_another(
    launch: Callable[[dict[str, list[str]]], Run], name: str
) -> None:
    """Between the choice of a port and the bind somebody else may have it: the service starts all the same."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = launch(TRIO | {name: [f"PORT={port}"]})
        run.wait_ready()
        record = run.record()
        assert record is not None
        ports = {pod.name: pod.ports["http"] for pod in record.pods}
        assert ports[name] != port
        text = run.output.read_text()
        assert f"{name}: port {port} is in use by another process; http moves to {ports[name]}" in text
        assert f"{name} ended: exit status 98" in text
        wait_until(lambda: "all ready" in run.output.read_text(), "the news")
        if name == "router":
            assert record.endpoint == f"http://127.0.0.1:{ports[name]}"
            assert f"all ready at {record.endpoint}" in run.output.read_text()
        run.stop()


def test_a_port_that_must_stay_is_tried_until_it_is_free(
    launch: Callable[[dict[str, list[str]]], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service does not end for it, and says which port it is."""
    monkeypatch.setenv("STAYS", "1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = launch(TRIO | {"router": [f"PORT={port}"]})
        told = "router ended: exit status 98"
        wait_until(lambda: run.output.read_text().count(told) >= 2, "two tries")
        assert f"    port {port}: Address already in use" in run.output.read_text()
    run.wait_ready()
    run.stop()


def test_a_lost_state_file_comes_back_and_a_lost_lock_stops_in_order(
    launch: Callable[[dict[str, list[str]]], Run], tmp_path: Path
) -> None:
    """What `ps` reads is restored; without its lock the folder is not the launcher's any more."""
    log = tmp_path / "stopped"
    run = launch({name: ["--stop-log", str(log)] for name in TRIO})
    run.wait_ready()
    family = run.family()
    run.state.state_file.unlink()
    wait_until(lambda: run.record() is not None, "the state file")
    run.state.lock_file.unlink()
    assert run.process.wait(WAIT_S) == 0
    assert gone(family)
    assert log.read_text().split() == ["router", "decode-0", "prefill-0"]
    assert "lock was removed or replaced" in run.output.read_text()


def test_output_is_prefixed_on_the_terminal_and_kept_per_pod(launch: Callable[[dict[str, list[str]]], Run]) -> None:
    """Lines say whose they are; each pod has its own file, readable by its owner only."""
    run = launch(TRIO)
    run.wait_ready()
    run.stop()
    assert "decode-0  | hello from decode-0\n" in run.output.read_text()
    log = run.state.logs / "decode-0.log"
    assert log.read_text() == "hello from decode-0\n"
    assert log.stat().st_mode & 0o777 == 0o600
    assert run.state.path.stat().st_mode & 0o777 == 0o700


def test_a_port_that_is_taken_shows_in_the_pods_own_words(launch: Callable[[dict[str, list[str]]], Run]) -> None:
    """Why a pod does not come up can be read on the terminal."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        run = launch({"decode-0": [], "decode-1": ["--port", str(taken.getsockname()[1])], "router": []})
        wait_until(lambda: "Address already in use" in run.output.read_text(), "the failing pod")
    run.stop()
