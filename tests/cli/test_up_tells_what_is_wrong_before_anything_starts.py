"""What `up` finds before its first process: in words that name the field, also through the pipe of `--detach`."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvferry_cli.errors import ExitCode
from kvferry_cli.local.background import Report, Reporter, wait_for_report
from kvferry_cli.local.state_dir import StateDir
from kvferry_cli.main import main

MANIFEST = """\
apiVersion: serving.kvferry.dev/v1alpha1
kind: InferenceService
metadata: {name: demo}
spec:
  model: {name: toy, source: toy}
  engine: {kvBlocks: 128, maxModelLen: 1024}
  prefill: {replicas: 1}
  decode: {replicas: 1}
  router: {auth: none}
"""


@pytest.fixture
def up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run `up` over a changed manifest, and fail should it come as far as to run anything."""

    def nothing_starts(*_: object) -> None:
        raise AssertionError("a service was started")

    monkeypatch.setattr("kvferry_cli.commands.up.run_service", nothing_starts)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))

    def run(*options: str, **changes: str) -> tuple[int, str]:
        text = MANIFEST
        for old, new in changes.items():
            assert old in text
            text = text.replace(f"{old}: {_given(text, old)}", f"{old}: {new}")
        (tmp_path / "m.yaml").write_text(text)
        code = main(["up", str(tmp_path / "m.yaml"), "--port", "0", *options])
        return code, capsys.readouterr().err

    return run


def _given(text: str, field: str) -> str:
    rest = text[text.index(f"{field}: ") + len(field) + 2 :]
    return rest[: min(rest.index(end) for end in (",", "}") if end in rest)]


def test_a_folder_without_a_model_is_refused(up: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """Its headers are opened here, not by each of the engines."""
    (tmp_path / "empty").mkdir()
    code, err = up(source="./empty")
    assert code == 1
    assert err.startswith(f"kvferry: spec.model.source: {tmp_path / 'empty'}: no model: config.json")


def test_kv_blocks_that_cannot_hold_one_sequence_are_refused(up: Callable[..., tuple[int, str]]) -> None:
    """The field, what was given and what is accepted; 63 blocks of 16 tokens hold 1008."""
    code, err = up(kvBlocks="63")
    assert code == 2
    assert "spec.engine.kvBlocks: got 63; accepts at least 64" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "expected"), [("a:zz\n", "line 1: a SHA-256 digest has 64 hex digits"), ("# none\n", "holds no key")]
)
def test_api_keys_that_the_router_would_refuse_are_refused(
    up: Callable[..., tuple[int, str]], tmp_path: Path, content: str, expected: str
) -> None:
    """The file's content is read, not only its name."""
    (tmp_path / "keys").write_text(content)
    code, err = up(auth="apiKeys, apiKeys: {keysFile: keys}")
    assert code == 1
    assert err.startswith("kvferry: spec.router.apiKeys.keysFile: ")
    assert expected in err


def test_the_background_process_reports_faults_through_its_pipe(up: Callable[..., tuple[int, str]]) -> None:
    """The user reads them at the terminal of the command that waits, with their exit code."""
    read_end, write_end = os.pipe()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        number = taken.getsockname()[1]
        assert up("--port", str(number), "--background-fd", str(write_end))[0] == 1
    report = wait_for_report(read_end, 5.0)
    os.close(read_end)
    assert report == Report(
        event="ended", failure=f"port {number} on 127.0.0.1 is already in use; choose another with --port"
    )


def test_the_end_of_the_pipe_is_not_taken_for_a_lack_of_time() -> None:
    """A process that ended and one that is slow are told apart."""
    read_end, write_end = os.pipe()
    with pytest.raises(TimeoutError):
        wait_for_report(read_end, 0.01)
    os.close(write_end)
    assert wait_for_report(read_end, 5.0) is None
    os.close(read_end)


def test_a_report_keeps_exit_code_and_place_of_a_fault() -> None:
    """A fault of the manifest is shown as it would be in the foreground."""
    read_end, write_end = os.pipe()
    Reporter(write_end).ended("m.yaml:1: x", code=ExitCode.USAGE, located=True)
    report = wait_for_report(read_end, 5.0)
    os.close(read_end)
    assert report is not None
    assert msgspec.structs.astuple(report) == ("ended", "m.yaml:1: x", ExitCode.USAGE, True)


def test_the_loser_of_two_ups_leaves_the_winners_log_alone(up: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """The log is emptied by who holds the folder."""
    state = StateDir(tmp_path / "s")
    state.create()
    state.lock()
    state.launcher_log.write_text("of the winner\n")
    read_end, write_end = os.pipe()
    code, err = up("--state-dir", str(state.path), "--background-fd", str(write_end))
    os.close(read_end)
    state.unlock()
    assert code == 1
    assert "already runs from" in err
    assert state.launcher_log.read_text() == "of the winner\n"
