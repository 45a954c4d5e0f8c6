"""`kvferry bench pd` as a user types it, over real pods with the toy model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

MANIFEST = """\
apiVersion: serving.kvferry.dev/v1alpha1
kind: InferenceService
metadata: {name: toy}
spec:
  model: {name: toy, source: toy}
  engine: {kvBlocks: 256, maxModelLen: 1024, threads: 1}
  prefill: {replicas: 1}
  decode: {replicas: 1}
  router: {auth: none, disaggregation: {mode: auto, minUncachedTokens: 64}}
"""
SMALL = ["--streams", "2", "--stream-tokens", "40", "--prompts", "2", "--prompt-tokens", "200", "--rounds", "1"]


def command(folder: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    (folder / "m.yaml").write_text(MANIFEST)
    (folder / "tmp").mkdir()
    argv = [sys.executable, "-P", "-m", "kvferry_cli", "bench", "pd", "m.yaml", *SMALL, *more]
    return argv, {**os.environ, "TMPDIR": str(folder / "tmp"), "XDG_STATE_HOME": str(folder / "xdg")}


def test_a_small_comparison_gives_table_json_and_plot(tmp_path: Path) -> None:
    """Every figure of both sides, the cores, a verdict; answers were judged; nothing is left behind."""
    argv, env = command(tmp_path, "--json", "out.json", "--plot", "out.png")
    result = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in ("time to first token p50", "inter-token latency p99", "tokens written", "verdict: disaggregation "):
        assert line in result.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["pays"] in ("yes", "no", "in part")
    assert set(found["setups"]) == {"disaggregated", "aggregated"}
    assert [each["paths"] for each in found["rounds"]] == [["disaggregated"], ["aggregated"]]
    assert all(len(each["time_to_first_token_ms"]) == 2 and each["gaps_ms"] for each in found["rounds"])
    assert found["answers"]["differing"] == 0
    assert found["answers"]["judged"] == 4
    assert sum(pod["pulls"] for pod in found["rounds"][0]["pods"]) == 2
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_every_process(tmp_path: Path, number: signal.Signals) -> None:
    """While pods start, with the code of an interrupted command; no process and no folder stays."""
    argv, env = command(tmp_path)
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        us = psutil.Process(process.pid)
        wait_for(lambda: len(us.children(recursive=True)) >= 2, "pods", 120)
        family = us.children(recursive=True)
        process.send_signal(number)
        assert process.stderr is not None
        err = process.stderr.read()
        assert process.wait(60) == 130, err
    wait_for(lambda: not [each for each in family if each.is_running() and each.status() != "zombie"], "the end")
    assert not list((tmp_path / "tmp").iterdir())
    assert "Traceback" not in err
