"""The small parts of local mode: ports, log files, the terminal, the state folder, process identity."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry_cli.errors import UserError
from kvferry_cli.local import registry
from kvferry_cli.local.identity import ProcessId, identify, kill_trees, own_identity
from kvferry_cli.local.logs import LogFile, Screen
from kvferry_cli.local.pod import LocalPod, discovery, render
from kvferry_cli.local.ports import PodPorts, allocate
from kvferry_cli.local.probe import interpret
from kvferry_cli.local.process import describe_exit
from kvferry_cli.local.relocate import Relocator
from kvferry_cli.local.service import prepare
from kvferry_cli.local.state_dir import STATE_VERSION, PodRecord, ServiceRecord, StateDir
from kvferry_cli.main import main
from kvferry_operator.plan import Observed, ServicePlan, plan
from tests.operator.manifests import make_service


def make_plan(**changes: object) -> ServicePlan:
    return plan(make_service(**changes), Observed(cores=2))


def make_record() -> ServiceRecord:
    return ServiceRecord(
        version=STATE_VERSION,
        service="demo",
        model="tiny",
        manifest="m.yaml",
        revision="r",
        endpoint="http://127.0.0.1:1",
        auth="none",
        state="ready",
        launcher=own_identity(),
        pods=(),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ports_are_distinct_and_kept_over_runs(tmp_path: Path) -> None:
    """A pod has the same ports after a restart of the service."""
    file, endpoint = tmp_path / "ports.json", free_port()
    first = allocate(make_plan(), file, endpoint)
    numbers = [number for ports in first.values() for number in ports.values()]
    assert len(set(numbers)) == len(numbers) == 9
    assert first["router"] == {"http": endpoint}
    assert allocate(make_plan(), file, endpoint) == first


def test_a_port_that_was_taken_meanwhile_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    """Only what cannot be kept changes."""
    file, endpoint = tmp_path / "ports.json", free_port()
    first = allocate(make_plan(), file, endpoint)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first["decode-0"]["http"]))
        taken.listen(1)
        second = allocate(make_plan(), file, endpoint)
    assert second["decode-0"]["http"] != first["decode-0"]["http"]
    assert second["prefill-0"] == first["prefill-0"]
    assert second["decode-0"] | {"http": 0} == first["decode-0"] | {"http": 0}


def test_a_taken_endpoint_is_told_with_the_way_out(tmp_path: Path) -> None:
    """The message names the port and the option."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        number = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"port {number} on 127.0.0.1 is already in use; choose another with --port"
        ):
            allocate(make_plan(), tmp_path / "ports.json", number)


def test_port_0_takes_a_free_one(tmp_path: Path) -> None:
    """Also the endpoint's port may be chosen here, and is kept."""
    first = allocate(make_plan(), tmp_path / "ports.json", 0)
    assert first["router"]["http"] > 0
    assert allocate(make_plan(), tmp_path / "ports.json", 0) == first


def test_a_pod_that_moves_keeps_what_is_free_and_the_router_is_told(tmp_path: Path) -> None:
    """Only the taken port changes, in the pod's arguments, in discovery and in what is kept for the next run."""
    state, endpoint = StateDir(tmp_path), free_port()
    made = make_plan()
    ports = allocate(made, state.ports_file, endpoint)

    def rendered(given: PodPorts) -> tuple[LocalPod, ...]:
        return render(made, given, state, model="toy", api_keys_file=None, log_format="json")

    relocator = Relocator(ports, state, rendered, fixed=endpoint)
    before = ports["decode-0"]
    with socket.create_server(("127.0.0.1", before["http"])):
        moved = relocator.move("decode-0")
    assert moved.ports["http"] not in {number for pod in ports.values() for number in pod.values()}
    assert moved.ports | {"http": 0} == before | {"http": 0}
    assert moved.argv[moved.argv.index("--port") + 1] == str(moved.ports["http"])
    (found,) = [pod for pod in json.loads(state.pods_file.read_bytes())["pods"] if pod["name"] == "decode-0"]
    assert found["http"] == moved.ports["http"]
    assert allocate(made, state.ports_file, endpoint)["decode-0"] == moved.ports
    assert relocator.move("decode-0").ports == moved.ports
    with socket.create_server(("127.0.0.1", endpoint)):
        assert relocator.move("router").ports == {"http": endpoint}


def test_an_endpoint_that_nobody_chose_may_move(tmp_path: Path) -> None:
    """With port 0 any free one will do."""
    state, made = StateDir(tmp_path), make_plan()
    ports = allocate(made, state.ports_file, 0)

    def rendered(given: PodPorts) -> tuple[LocalPod, ...]:
        return render(made, given, state, model="toy", api_keys_file=None, log_format="json")

    with socket.create_server(("127.0.0.1", ports["router"]["http"])):
        assert Relocator(ports, state, rendered, fixed=0).move("router").ports != ports["router"]


def test_rendered_pods_name_their_files_and_the_router_gets_its_own_keys(tmp_path: Path) -> None:
    """No slot is left open; the router's key folder is another one."""
    state = StateDir(tmp_path)
    made = make_plan()
    ports = allocate(made, tmp_path / "ports.json", free_port())
    pods = render(made, ports, state, model="toy", api_keys_file=None, log_format="json")
    engine, router = pods[0].argv, pods[-1].argv
    assert engine[engine.index("--keys-dir") + 1] == str(state.keys)
    assert router[router.index("--keys-dir") + 1] == str(state.router_keys)
    assert engine[:4] == (sys.executable, "-P", "-m", "kvferry_runtime.server")
    assert "0.0.0.0" not in " ".join((*engine, *router))
    assert b'"prefill-0"' in discovery(pods)
    assert b'"router"' not in discovery(pods)


def test_a_log_file_is_cut_at_its_bound_and_keeps_one_older_part(tmp_path: Path) -> None:
    """Disk use is bounded, whatever a pod writes."""
    log = LogFile(tmp_path / "pod.log", max_bytes=100)
    for number in range(50):
        log.write(f"line {number:04}")
    log.close()
    assert (tmp_path / "pod.log").stat().st_size <= 100
    assert (tmp_path / "pod.log.1").stat().st_size <= 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pod.log", "pod.log.1"]
    assert (tmp_path / "pod.log").read_text().endswith("line 0049\n")
    assert log.tail(2) == ["line 0048", "line 0049"]


def test_the_tail_is_that_of_the_process_that_writes_now(tmp_path: Path) -> None:
    """A failure is not explained with lines of an earlier process."""
    log = LogFile(tmp_path / "pod.log")
    log.write("old")
    log.begin()
    log.write("new")
    log.close()
    assert log.tail() == ["new"]


def test_terminal_lines_have_names_and_no_control_characters() -> None:
    """What a pod prints cannot move the cursor or forge another pod's line."""
    stream = io.StringIO()
    screen = Screen(["decode-0", "router"], stream)
    screen.line("router", "a\x1b[2Jb\rc")
    screen.close()
    assert stream.getvalue() == "router   | a?[2Jb?c\n"


def test_a_slow_terminal_drops_lines_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher never waits for a terminal."""

    class Stuck(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.read_end, self.write_end = os.pipe()

        def write(self, text: str) -> int:
            if not self.getvalue():
                os.read(self.read_end, 1)
            return super().write(text)

    monkeypatch.setattr("kvferry_cli.local.logs.QUEUE_LINES", 10)
    stream = Stuck()
    screen = Screen(["pod"], stream)
    for number in range(100):
        screen.line("pod", str(number))
    os.write(stream.write_end, b"x")
    while screen.pending():
        pass
    screen.line("pod", "last")
    screen.close()
    os.close(stream.read_end)
    os.close(stream.write_end)
    assert "lines were not shown; they are in the log files" in stream.getvalue()
    assert stream.getvalue().endswith("pod     | last\n")


def test_state_is_written_whole_and_read_back(tmp_path: Path) -> None:
    """Readers see a whole state or none; a state of another version is none."""
    state = StateDir(tmp_path / "s")
    state.create()
    assert state.read_state() is None
    state.write_state(make_record())
    assert state.read_state() == make_record()
    assert state.state_file.stat().st_mode & 0o777 == 0o600
    state.state_file.write_text("{")
    assert state.read_state() is None


def test_a_locked_folder_is_refused_with_who_has_it(tmp_path: Path) -> None:
    """Two launchers never share a state folder."""
    state = StateDir(tmp_path / "s")
    state.create()
    state.write_state(make_record())
    assert not state.locked()
    state.lock()
    assert state.locked()
    with pytest.raises(UserError, match=r"service 'demo' \(pid \d+\) already runs from .*kvferry down --state-dir"):
        StateDir(tmp_path / "s").lock()
    state.unlock()
    assert not state.locked()


def test_a_state_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    """A file in its place, for example."""
    (tmp_path / "f").write_text("")
    with pytest.raises(UserError, match="choose another with --state-dir"):
        StateDir(tmp_path / "f" / "s").create()


def test_commands_find_the_one_running_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --state-dir: the one here, else the only one; with several the user must say which."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    assert registry.find(None).path == tmp_path / ".kvferry"
    one, two = StateDir(tmp_path / "one"), StateDir(tmp_path / "two")
    for state in (one, two):
        state.create()
        state.lock()
        assert registry.announce(state) == ""
    with pytest.raises(UserError, match="2 services run; say which"):
        registry.find(None)
    two.unlock()  # as if it had been killed: its entry stays, and is skipped
    assert registry.find(None).path == one.path
    assert registry.find(tmp_path / "two").path == two.path
    here = [StateDir(tmp_path / ".kvferry" / name) for name in ("a", "b")]
    for state in here:
        state.create()
        state.lock()
    with pytest.raises(UserError, match="2 services run; say which"):
        registry.find(None)
    here[0].unlock()
    assert registry.find(None).path == here[1].path
    here[1].unlock()
    registry.withdraw(one)
    assert registry.running() == []
    one.unlock()


def test_a_pid_used_again_is_not_ours() -> None:
    """The start time tells two processes with one pid apart."""
    me = own_identity()
    assert me.alive()
    assert me == identify(os.getpid())
    assert not ProcessId(me.pid, me.started - 1.0).alive()
    assert identify(2**22 + 1) is None


def test_killing_a_tree_takes_the_children_and_spares_strangers() -> None:
    """Descendants go, also in sessions of their own; an identity that does not fit kills nobody."""
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = identify(int(parent.stdout.readline()))
        root = identify(parent.pid)
        assert child is not None
        assert root is not None
        assert kill_trees([ProcessId(root.pid, root.started + 1.0)]) == []
        assert root.alive()
        assert sorted(kill_trees([root])) == sorted([root.pid, child.pid])
        assert not child.alive()


def make_leftover(state: StateDir) -> "subprocess.Popen[bytes]":
    """A process that an earlier run seems to have left: its pod is in ``state.json``, no launcher has the lock."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pod = PodRecord(
        name="decode-0",
        role="decode",
        state="ready",
        process=identify(process.pid),
        ports={},
        restarts=0,
        reason="",
    )
    state.create()
    launcher = ProcessId(own_identity().pid, 0.0)  # a pid that somebody else has by now
    state.write_state(msgspec.structs.replace(make_record(), pods=(pod,), launcher=launcher))
    return process


def test_the_next_up_ends_what_an_earlier_run_left(tmp_path: Path) -> None:
    """A stopped or stuck pod of a killed launcher keeps neither ports nor memory."""
    state = StateDir(tmp_path / "s")
    with make_leftover(state) as left:
        prepared = prepare(make_plan(), state, manifest=tmp_path / "m.yaml", model="toy", port=0)
        assert identify(left.pid) is None
    assert any(f"ended 1 processes that an earlier run had left: {left.pid}" in note for note in prepared.notes)
    assert sorted(path.name for path in state.keys.iterdir()) == ["hash", "http", "kv", "state"]
    assert sorted(path.name for path in state.router_keys.iterdir()) == ["hash", "http", "state"]
    assert state.pods_file.exists()


def test_down_ends_what_a_killed_launcher_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also without a launcher `down` leaves nothing of the service; strangers with a pid used again are spared."""
    state = StateDir(tmp_path / "s")
    with make_leftover(state) as left:
        assert main(["down", "--state-dir", str(state.path)]) == 0
        assert identify(left.pid) is None
    assert "ended 1 processes" in capsys.readouterr().out
    assert state.read_state() is None


def make_other_launcher() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_removed_lock_does_not_free_the_folder_of_a_living_launcher(tmp_path: Path) -> None:
    """The next `up` is refused, and the pods of the first service are left alone."""
    state = StateDir(tmp_path / "s")
    state.create()
    with make_other_launcher() as other:
        launcher = identify(other.pid)
        assert launcher is not None
        state.write_state(msgspec.structs.replace(make_record(), launcher=launcher))
        assert not state.locked()
        assert state.runs()
        assert state.launcher() == launcher
        with pytest.raises(UserError, match=rf"service 'demo' \(pid {other.pid}\) already runs from"):
            state.lock()
        other.kill()
        other.wait()
    assert not state.runs()
    state.lock()
    state.unlock()


def test_the_lock_file_tells_the_launcher_when_the_state_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ps` does not say that nothing runs, and `down` can stop it."""
    state = StateDir(tmp_path / "s")
    state.create()
    state.lock()
    assert StateDir(state.path).launcher() == own_identity()
    assert main(["ps", "--state-dir", str(state.path)]) == 1
    assert f"a service (pid {os.getpid()}) runs from {state.path}, but shows no state" in capsys.readouterr().err
    state.unlock()
    program = (
        "import sys, time; from pathlib import Path; from kvferry_cli.local.state_dir import StateDir\n"
        "StateDir(Path(sys.argv[1])).lock(); print('locked', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(state.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert main(["down", "--state-dir", str(state.path)]) == 0
        assert other.wait(5) == -15
    assert f"the service of {state.path} stopped" in capsys.readouterr().out


def test_a_lock_that_was_replaced_or_removed_is_not_held(tmp_path: Path) -> None:
    """A launcher can tell that its folder is not its own any more."""
    state = StateDir(tmp_path / "s")
    assert not state.held()
    state.create()
    state.lock()
    assert state.held()
    state.lock_file.unlink()
    assert not state.held()
    state.lock_file.touch()
    assert not state.held()
    state.unlock()


@pytest.mark.parametrize("command", ["ps", "down"])
def test_files_in_the_place_of_folders_and_the_reverse_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """One line that names the path, instead of a traceback."""
    file, folder = tmp_path / "f", tmp_path / "s"
    file.write_text("")
    assert main([command, "--state-dir", str(file)]) == 2
    assert capsys.readouterr().err == f"kvferry: --state-dir: {file} is no folder\n"
    (folder / "state.json").mkdir(parents=True)
    assert main([command, "--state-dir", str(folder)]) == 1
    assert capsys.readouterr().err == f"kvferry: {folder / 'state.json'}: Is a directory\n"


@pytest.mark.parametrize(("code", "text"), [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL")])
def test_exits_are_told_in_words(code: int, text: str) -> None:
    """A return code is explained."""
    assert describe_exit(code) == text


@pytest.mark.parametrize(
    ("answer", "ready", "live", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", True, True, ""),
        (b'HTTP/1.1 503 X\r\n\r\n{"ready": false, "reason": "loading"}', False, True, "loading"),
        (b"HTTP/1.1 500 X\r\n\r\noops", False, True, "status 500"),
        (b"HTTP/1.1 404 X\r\n\r\n[1]", False, True, "status 404"),
        (b"SSH-2.0-x\r\n", False, False, "what listens on its port does not speak HTTP"),
        (b"", False, False, "what listens on its port does not speak HTTP"),
    ],
)
def test_probe_answers_are_understood(answer: bytes, ready: bool, live: bool, reason: str) -> None:
    """Ready only with 200; the reason of a pod that is not ready is its own."""
    result = interpret(answer)
    assert (result.ready, result.live, result.reason) == (ready, live, reason)
