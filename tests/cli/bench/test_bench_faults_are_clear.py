"""Wrong arguments and manifests of `kvferry bench` end with a message and code 2, before anything is started."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry_cli.bench import plot
from kvferry_cli.commands import bench
from kvferry_cli.main import main

ROOT = Path(__file__).parents[3]
TOY = (ROOT / "examples" / "toy.yaml").read_text()
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`kvferry bench` in a folder with the manifest m.yaml; nothing may be started."""
    monkeypatch.chdir(tmp_path)

    def started(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(bench, "measure", started)

    def call(*argv: str, manifest: str | None = TOY) -> tuple[int, str]:
        if manifest is not None:
            (tmp_path / "m.yaml").write_text(manifest)
        try:
            code = main(["bench", *argv])
        except SystemExit as end:
            code = int(end.code or 0)
        err = capsys.readouterr().err
        assert "Traceback" not in err
        return code, err

    return call


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "the following arguments are required: BENCHMARK"),
        (["dp", "m.yaml"], "invalid choice: 'dp'"),
        (["pd"], "the following arguments are required: MANIFEST"),
        (["pd", "m.yaml", "--rounds", "0"], "argument --rounds: got '0'; accepts an integer from 1 to 1000"),
        (["pd", "m.yaml", "--rounds", "many"], "argument --rounds: got 'many'; accepts an integer from 1 to 1000"),
        (["pd", "m.yaml", "--streams", "-1"], "argument --streams: got '-1'; accepts an integer from 1 to 4096"),
        (["pd", "m.yaml", "--answer-tokens", "1"], "argument --answer-tokens: got '1'; accepts an integer from 2 to"),
        (["pd", "m.yaml", "--pause", "nan"], "argument --pause: got 'nan'; accepts seconds from 0 to 3600"),
        (["pd", "m.yaml", "--seed", "0.5"], "argument --seed: got '0.5'; accepts an integer from 0 to"),
        (["pd", "m.yaml", "--round-limit", "0"], "argument --round-limit: got '0'; accepts seconds from"),
        (["pd", "m.yaml", "--round", "3"], "unrecognized arguments: --round 3"),
        (["pd", "m.yaml", "--json", "no/where.json"], "--json: there is no folder "),
        (["pd", "m.yaml", "--json", "."], "--json: . is a folder; accepts a file"),
        (["pd", "m.yaml", "--plot", "p.svg"], "--plot: got 'p.svg'; accepts a name that ends in .png"),
        (
            ["pd", "m.yaml", "--prompt-tokens", "5000"],
            "m.yaml: --prompt-tokens and --answer-tokens: 5008 together; spec.engine.maxModelLen is 4096",
        ),
        (["pd", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    ],
)
def test_wrong_arguments_are_told(run: Run, argv: list[str], expected: str) -> None:
    """What was given, and what is accepted."""
    code, err = run(*argv)
    assert code == 2
    assert expected in err


@pytest.mark.parametrize(
    ("old", "new", "code", "expected"),
    [
        ("mode: always ", "mode: never ", 2, "m.yaml: spec.router.disaggregation.mode: got never; accepts auto or"),
        ("  decode:\n    replicas: 2", "  decode:\n    replicas: 0", 2, "m.yaml: spec.decode.replicas: got 0"),
        ("kvBlocks: 512", "kvBlocks: 16", 2, "m.yaml: spec.engine.kvBlocks: got 16; accepts at least 256"),
        ("replicas: 2", "replicas: two", 2, 'm.yaml:20: spec.decode.replicas: got "two" (string)'),
        ("source: toy", "source: ./nowhere", 1, "model ./nowhere: there is no "),
        ("source: toy", "source: 'pvc://claim'", 2, "spec.model.source: got pvc://claim"),
        ("maxModelLen: 4096", "maxModelLen: 1000", 2, "1508 together; spec.engine.maxModelLen is 1000"),
    ],
)
def test_manifests_that_cannot_be_measured_are_told(run: Run, old: str, new: str, code: int, expected: str) -> None:
    """By field, as `kvferry up` does, and what only a comparison needs."""
    assert old in TOY
    got, err = run("pd", "m.yaml", manifest=TOY.replace(old, new))
    assert (got, expected in err) == (code, True), err


def test_a_manifest_without_prefill_pods_has_nothing_to_compare(run: Run) -> None:
    """Neither with none named nor with zero of them."""
    for text in (TOY.replace("  prefill:\n    replicas: 1\n", ""), TOY.replace("replicas: 1", "replicas: 0")):
        code, err = run("pd", "m.yaml", manifest=text.replace("mode: always ", "mode: auto "))
        assert code == 2
        assert "m.yaml: spec.prefill.replicas: got 0; accepts at least 1" in err


def test_a_plot_without_its_library_is_told_with_the_remedy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before minutes are spent on measuring."""
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    code, err = run("pd", "m.yaml", "--plot", "p.png")
    assert code == 2
    assert f"--plot: needs matplotlib, which is not installed: {sys.executable} -m pip install matplotlib" in err


def test_a_model_that_takes_less_is_told(run: Run) -> None:
    """Where the manifest leaves the length to the model."""
    text = TOY.replace("    maxModelLen: 4096\n", "")
    code, err = run("pd", "m.yaml", "--prompt-tokens", "1000000", manifest=text)
    assert code == 2
    assert "the load's longest sequence has 1000008 tokens; the model takes " in err
