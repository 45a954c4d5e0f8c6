"""The table on the terminal and the JSON: figures, conditions and verdict of one comparison."""

import json
from typing import Any

import msgspec

from kvferry_cli.bench.comparison import Judged, Measured, Setup
from kvferry_cli.bench.figures import compare
from kvferry_cli.bench.manifests import SIDES
from kvferry_cli.bench.report import Machine, Report, as_json, as_text
from kvferry_cli.bench.verdict import facts_of, judge
from tests.cli.bench.builders import LOAD, make_pod, make_rounds

ANSWERS = Judged(answers=12, equal=6, single=0, differing=0, judged=4, unjudged=0)


def make_report(**changes: Any) -> Report:
    pods = (make_pod("prefill-0"), make_pod("decode-0", pulls=2, pull_s=0.5, pull_bytes=2**20))
    rounds = make_rounds({"pods": pods}, {"stall_s": 0.6})
    figures, facts = compare(rounds), facts_of(rounds, cores=2)
    setup = Setup(
        pods={"decode-0": "core 0"},
        threads={"decode-0": 1},
        dtype="float32",
        token_budget={"decode-0": 224},
        kv_tokens={"decode-0": 1000},
    )
    measured = Measured(
        rounds=tuple(rounds),
        setups=dict.fromkeys(SIDES, setup),
        pinning="",
        answers=ANSWERS,
        load_average=(0.1, 2.0),
    )
    return Report(
        machine=Machine(cpu="A CPU", cores=(0, 1), system="s", python="3", torch="2", kvferry="0", command="kvferry x"),
        manifest="m.yaml",
        model="m",
        load=LOAD,
        measured=msgspec.structs.replace(measured, **changes),
        figures=figures,
        facts=facts,
        verdict=judge(figures, facts),
        notes=("a note",),
    )


def test_the_table_shows_median_spread_ratio_and_bar() -> None:
    """A line per figure, in columns; the cores, the transfers and the verdict around it."""
    text = as_text(make_report())
    (line,) = (line for line in text.splitlines() if line.startswith("inter-token latency p99"))
    assert line.split("  ")[-1] == "<= 0.2: reached"
    assert "100 [100 .. 100]" in line
    assert "600 [600 .. 600]" in line
    assert "0.17 [0.17 .. 0.17]" in line
    assert "decode-0 (core 0, 1 threads, steps of 224 tokens)" in text
    assert "transfers: 6 pulls, 3.0 MiB in 1.50 s (2.0 MiB/s); about 250.0 ms for a long prompt" in text
    assert "prefill-0 50%, decode-0 50%; 30 s measured" in text
    assert "verdict: disaggregation pays on this machine under this load" in text
    assert "note:     a note" in text
    assert "not pinned" not in text


def test_what_weakens_a_measurement_is_shown() -> None:
    """Pods without cores of their own; answers that differ and were not judged."""
    answers = msgspec.structs.replace(ANSWERS, differing=3, unjudged=2)
    text = as_text(make_report(pinning="too few cores", answers=answers))
    assert "not pinned: too few cores" in text
    assert "2 that differ were NOT judged (--judged)" in text


def test_the_json_holds_every_sample() -> None:
    """What the table was made of can be computed again from it."""
    value = json.loads(as_json(make_report()))
    assert value["figures"]["inter-token latency p99"]["reached"] is True
    assert len(value["rounds"]) == 6
    first = value["rounds"][0]
    assert (first["side"], first["time_to_first_token_ms"], first["window_s"]) == ("disaggregated", [1000.0], 10.0)
    assert first["prompts_ms"] == [[0.0, 1000.0, 1200.0]]
    assert all(len(pair) == 2 for pair in first["gaps_ms"])
    assert value["verdict"]["pays"] == value["pays"] == "yes"
    assert value["machine"]["cores"] == [0, 1]
