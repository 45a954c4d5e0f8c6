"""Faults of the user end with a message and the documented exit code, never with a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry_cli.main import build_parser, main
from kvferry_cli.program import command

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services of this machine's user are none of the tests' business."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_a_manifest_with_faults_shows_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Line, field, what was given, what is accepted; exit code 2; nothing was created."""
    file = tmp_path / "m.yaml"
    file.write_text((ROOT / "examples" / "toy.yaml").read_text().replace("replicas: 2", "replicas: two\n    x: 1"))
    code, _, err = run(capsys, "up", str(file))
    assert code == 2
    assert f'{file}:20: spec.decode.replicas: got "two" (string); accepts an integer from 0 to 64' in err
    assert f"{file}:21: spec.decode.x: unknown field" in err
    assert not (tmp_path / ".kvferry").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        (b"\xff\xfe", "m.yaml:1: not UTF-8"),
        (b"", "m.yaml:1: empty"),
        (b"x" * 300_000, "accepts at most 262144"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, expected: str
) -> None:
    """Missing, binary, empty or huge."""
    file = tmp_path / "m.yaml"
    if content is not None:
        file.write_bytes(content)
    code, _, err = run(capsys, "up", str(file))
    assert code == 2
    assert expected in err


def test_what_one_machine_cannot_run_is_told_with_its_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest for a cluster says what it lacks here."""
    file = tmp_path / "m.yaml"
    text = (ROOT / "examples" / "toy.yaml").read_text()
    file.write_text(text.replace("auth: none", "apiKeys: {secretRef: {name: keys}}"))
    code, _, err = run(capsys, "up", str(file))
    assert code == 2
    assert "spec.router.apiKeys.keysFile: missing; on one machine API keys are read from a file" in err


def test_a_model_that_is_not_there_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path is looked for beside the manifest."""
    file = tmp_path / "m.yaml"
    file.write_text((ROOT / "examples" / "toy.yaml").read_text().replace("source: toy", "source: ./nowhere"))
    code, _, err = run(capsys, "up", str(file))
    assert code == 1
    assert f"model ./nowhere: there is no {tmp_path / 'nowhere'}" in err


@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        (["ps"], 3, "no service runs from"),
        (["chat", "-m", "hi"], 3, "no service runs from"),
        (["chat", "--url", "ftp://x"], 2, "accepts http://HOST:PORT"),
        (["chat", "--url", "http://[::1"], 2, "accepts http://HOST:PORT"),
        (["chat", "--temperature", "nan"], 2, "got 'nan'; accepts a number"),
        (["chat", "--url", "127.0.0.1:1", "-m", "hi"], 1, "cannot be reached: Connection refused"),
        (["up"], 2, "the following arguments are required: FILE"),
        (["up", "f", "--port", "x"], 2, "got 'x'; accepts a port from 1 to 65535"),
        (["up", "f", "--wait", "-1"], 2, "accepts seconds"),
        (["nonsense"], 2, "invalid choice: 'nonsense'"),
        ([], 2, "the following arguments are required: COMMAND"),
        (["serve"], 2, "--model: not given"),
        (["serve", "toy", "--dtype", "float7", "--nope"], 2, "--nope: not a flag"),
        (["serve", "no_such_model"], 2, "not a model source; accepts"),
        (["model", "fetch", "no_such_model"], 2, "not a model source; accepts"),
        (["model", "fetch", "image://registry/model:1"], 2, "model image://registry/model:1: needs a cluster"),
        (["model", "fetch", "pvc://claim/inside"], 2, "model pvc://claim/inside: needs a cluster"),
        (["serve", "pvc://claim"], 2, "model pvc://claim: needs a cluster"),
        (["model", "fetch", "http://169.254.169.254/latest/"], 14, "never asked"),
        (["model", "fetch", "https://models.example.com/m"], 2, "not a model source; accepts"),
        (["model", "fetch", "--max-bytes", "1G", "toy"], 2, "accepts a number of bytes"),
        (["model", "fetch", "--link", "../x", "toy"], 2, "accepts a name without /"),
        (["model", "fetch", "org/name@main"], 12, "hf://org/name@main: HF_HUB_OFFLINE is set"),
    ],
)
def test_wrong_use_ends_with_its_code(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, expected: str
) -> None:
    """Each fault has the exit code that `kvferry --help` documents."""
    got, _, err = run(capsys, *argv)
    assert got == code
    assert expected in err


def test_down_without_a_service_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """Stopping is idempotent."""
    assert run(capsys, "down")[:2] == (0, f"no service runs from {Path.cwd() / '.kvferry'}\n")


def test_a_local_folder_is_checked_when_it_is_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is here already needs no download, but must be a model."""
    (tmp_path / "model").mkdir()
    code, out, err = run(capsys, "model", "fetch", "./model")
    assert (code, out) == (14, "")
    assert err.startswith(f"kvferry: {tmp_path / 'model'}: no model: ")


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ValueError("a\nb")])
def test_what_nobody_foresaw_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """The last resort for faults of files and input: exit code 1, no traceback."""

    def fail(_: object) -> None:
        raise fault

    monkeypatch.setattr("kvferry_cli.local.registry.find", fail)
    code, _, err = run(capsys, "ps")
    assert code == 1
    assert err.startswith("kvferry: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/no such/bin/kvferry", "'/no such/bin/kvferry' down --state-dir 'a b'"),
        ("/x/kvferry_cli/__main__.py", f"{sys.executable} -m kvferry_cli down --state-dir 'a b'"),
        ("/x/pytest", "kvferry down --state-dir 'a b'"),
    ],
)
def test_printed_commands_can_be_run_as_printed(monkeypatch: pytest.MonkeyPatch, typed: str, expected: str) -> None:
    """They begin as the user's own command did, and are quoted for a shell."""
    monkeypatch.setattr(sys, "argv", [typed])
    assert command("down", "--state-dir", "a b") == expected


def test_every_option_of_every_command_is_explained() -> None:
    """`--help` leaves no option without words."""
    bare: list[str] = []

    def walk(parser: object, name: str) -> None:
        for action in parser._actions:  # type: ignore[attr-defined]  # argparse has no public list
            if isinstance(action.choices, dict):
                for command, below in action.choices.items():
                    walk(below, f"{name} {command}")
            elif not action.help:
                bare.append(f"{name} {action.dest}")

    walk(build_parser(), "kvferry")
    assert not bare


def test_serve_help_shows_the_engines_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """All flags of one engine, with their defaults."""
    code, out, _ = run(capsys, "serve", "--help")
    assert code == 0
    for flag in ("--dtype", "--kv-memory", "--no-prefix-caching", "[default: 8000]"):
        assert flag in out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """By the command and by the option."""
    assert run(capsys, "version")[1] == run(capsys, "--version")[1]


def test_a_reader_that_goes_away_is_no_fault(tmp_path: Path) -> None:
    """`kvferry --help | head -1` prints no traceback."""
    shell = f"{sys.executable} -P -m kvferry_cli --help | head -1"
    result = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert result.stderr == ""
