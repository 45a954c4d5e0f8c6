"""The command line: all that is wrong is told together, with what was given and what is accepted."""

import json
from pathlib import Path

import pytest

from kvferry_operator.__main__ import main
from kvferry_operator.shell.options import OptionsError, parse_options

GOOD = {"runtimeImage": "a:1", "routerImage": "b:1"}


@pytest.fixture
def settings(tmp_path: Path) -> str:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(GOOD))
    return f"--settings-file={path}"


BASE = ("--lease-namespace=kvferry-system", "--identity=pod-1")


def test_the_charts_command_line_is_understood(settings: str) -> None:
    """As charts/kvferry/templates/deployment.yaml has it."""
    chart = ("--lease-name=kvferry-operator", "--port=9090", "--log-level=info", "--log-format=json", "--host=10.0.0.1")
    options = parse_options([settings, *BASE, *chart, "--namespaces=a,b,a"])
    assert options.namespaces == ("a", "b")
    assert (options.port, options.host, options.log_json) == (9090, "10.0.0.1", True)
    assert options.settings.runtime_image == "a:1"
    assert parse_options([settings, *BASE, "--all-namespaces"]).namespaces is None


def test_everything_wrong_is_told_at_once(settings: str, tmp_path: Path) -> None:
    """One start is enough to see all."""
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({**GOOD, "colour": "red"}))
    with pytest.raises(OptionsError) as caught:
        parse_options(
            [f"--settings-file={bad}", "--lease-namespace=A_b", "--identity=", "--port=99999", "--namespaces=ok,-bad"]
        )
    told = str(caught.value)
    for part in (
        "--lease-namespace: got 'A_b'",
        "--identity: empty",
        "--port: got 99999",
        "--namespaces: got '-bad'",
        "colour",
    ):
        assert part in told
    assert str(bad) in told


@pytest.mark.parametrize("where", [["--namespaces="], ["--namespaces=,"]])
def test_no_namespace_is_refused(settings: str, where: list[str]) -> None:
    """Serving none is never meant."""
    with pytest.raises(OptionsError, match="--all-namespaces"):
        parse_options([settings, *BASE, *where])


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2: something that the caller must mend."""
    assert main(["--settings-file=/nowhere/x.json", *BASE, "--all-namespaces"]) == 2
    assert "/nowhere/x.json: No such file" in capsys.readouterr().err
