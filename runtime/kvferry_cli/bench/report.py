"""A comparison for a reader: the table on the terminal, and everything as one JSON object. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry_cli.bench.comparison import Measured
from kvferry_cli.bench.figures import Figure, Spread, first_token_s, gaps, prompts_of
from kvferry_cli.bench.load import LoadSpec
from kvferry_cli.bench.manifests import SIDES, Side
from kvferry_cli.bench.records import PodUse, Round
from kvferry_cli.bench.verdict import Facts, Verdict, pods_of

JSON_VERSION = 1


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how it was measured."""

    cpu: str
    cores: tuple[int, ...]  # that the command could use
    system: str
    python: str
    torch: str
    kvferry: str
    command: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown and written."""

    machine: Machine
    manifest: str
    model: str
    load: LoadSpec
    measured: Measured
    figures: dict[str, Figure]
    facts: Facts
    verdict: Verdict
    notes: tuple[str, ...]


def as_text(report: Report) -> str:
    """The whole report for a terminal."""
    parts = [_conditions(report), _table(report.figures), _uses(report), _answers(report), _verdict(report)]
    return "\n\n".join(parts)


def _conditions(report: Report) -> str:
    machine, load, measured = report.machine, report.load, report.measured
    before, after = measured.load_average
    lines = [
        f"machine:  {machine.cpu}, {len(machine.cores)} cores, {machine.system}, load average {before:.1f} before, "
        f"{after:.1f} after",
        f"software: kvferry {machine.kvferry}, torch {machine.torch}, Python {machine.python}",
        f"command:  {machine.command}",
        f"service:  {report.manifest}, model {report.model}, {_dtype(measured)}",
        f"load:     {load.streams} streams of {load.stream_prompt_tokens} + {load.stream_tokens} tokens, no pause; "
        f"{load.prompts} prompts of {load.prompt_tokens} + {load.answer_tokens} tokens one at a time, at most "
        f"{load.pause_s:g} s apart; {load.rounds} rounds of each side in turn after one that does not count, seed "
        f"{load.seed}",
    ]
    for side in SIDES:
        setup = measured.setups[side]
        pods = ", ".join(
            f"{name} ({cores}, {setup.threads[name]} threads, steps of {setup.token_budget[name]} tokens)"
            for name, cores in setup.pods.items()
        )
        lines.append(f"{side + ':':15}{pods}")
    lines.append("               router and load generator: any core")
    if measured.pinning:
        lines.append(f"               not pinned: {measured.pinning}")
    return "\n".join(lines + [f"note:     {note}" for note in report.notes])


def _dtype(measured: Measured) -> str:
    return next(iter(measured.setups.values())).dtype


def _table(figures: Mapping[str, Figure]) -> str:
    rows = [("median of rounds [least .. most]", "", "disaggregated", "aggregated", "ratio", "bar")]
    rows += [
        (
            figure.name,
            figure.unit,
            _spread(figure.disaggregated),
            _spread(figure.aggregated),
            _spread(figure.ratio, ".2f"),
            _bar(figure),
        )
        for figure in figures.values()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _spread(spread: Spread, form: str = "") -> str:
    low, median, high = (
        f"{value:{form or ('.1f' if value < 100 else '.0f')}}" for value in (spread.low, spread.median, spread.high)
    )
    return f"{median} [{low} .. {high}]"


def _bar(figure: Figure) -> str:
    if figure.bar is None:
        return ""
    return f"<= {figure.bar:g}: {'reached' if figure.reached else 'not reached'}"


def _uses(report: Report) -> str:
    lines = ["CPU time of each pod, over that of its compute threads:"]
    rounds = report.measured.rounds
    for side in SIDES:
        pods = pods_of(rounds, side)
        seconds = sum(measured.window_s for measured in rounds if measured.side == side)
        shares = ", ".join(
            f"{uses[0].name} {sum(use.cpu_s for use in uses) / (uses[0].threads * seconds):.0%}" for uses in pods
        )
        lines.append(f"  {side + ':':15}{shares}; {seconds:.0f} s measured")
    lines.append(_transfers(rounds, report.facts))
    return "\n".join(lines)


def _transfers(rounds: Sequence[Round], facts: Facts) -> str:
    uses = [use for measured in rounds if measured.side == "disaggregated" for use in measured.pods]
    pulls, nbytes, seconds = _total(uses, "pulls"), _total(uses, "pull_bytes"), _total(uses, "pull_s")
    if not pulls or not seconds:
        return "transfers: none"
    return (
        f"transfers: {pulls:g} pulls, {_size(nbytes)} in {seconds:.2f} s ({_size(nbytes / seconds)}/s); about "
        f"{1000 * facts.pull_s:.1f} ms for a long prompt; {_total(uses, 'pulls_failed'):g} failed, "
        f"{_total(uses, 'recomputed'):g} prompts computed anew"
    )


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _total(uses: Sequence[PodUse], name: str) -> float:
    return float(sum(getattr(use, name) for use in uses))


def _answers(report: Report) -> str:
    answers = report.measured.answers
    text = (
        f"answers: {answers.answers}, none wrong; {answers.equal} requests were answered alike by both sides, "
        f"{answers.differing} answers differ at near ties, {answers.single} have no counterpart; {answers.judged} "
        "judged token by token"
    )
    if answers.unjudged:
        text += f"; {answers.unjudged} that differ were NOT judged (--judged)"
    return text


def _verdict(report: Report) -> str:
    verdict = report.verdict
    lines = [f"verdict: {verdict.headline}"]
    for title, told in (
        ("better", verdict.gains),
        ("worse", verdict.losses),
        ("because", verdict.reasons),
        ("mind", verdict.cautions),
    ):
        lines += [f"  {title + ':':9}{text}" for text in told]
    return "\n".join(lines)


# ---- JSON ----------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> bytes:
    """The report with the samples of each round, as indented JSON."""
    measured = report.measured
    value = {
        "version": JSON_VERSION,
        "pays": report.verdict.pays,
        "machine": report.machine,
        "manifest": report.manifest,
        "model": report.model,
        "dtype": _dtype(measured),
        "load": report.load,
        "load_average": measured.load_average,
        "setups": measured.setups,
        "not_pinned": measured.pinning,
        "notes": report.notes,
        "figures": {
            name: {**msgspec.to_builtins(figure), "reached": figure.reached} for name, figure in report.figures.items()
        },
        "facts": report.facts,
        "answers": measured.answers,
        "verdict": report.verdict,
        "rounds": [_round_as_value(each) for each in measured.rounds],
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _round_as_value(measured: Round) -> dict[str, Any]:
    """Times in milliseconds; those of tokens count from the window's beginning."""
    return {
        "side": measured.side,
        "number": measured.number,
        "window_s": round(measured.window_s, 4),
        "time_to_first_token_ms": [_ms(value) for value in first_token_s(measured)],
        "paths": sorted({trace.path for trace in prompts_of(measured)}),
        "gaps_ms": [[_ms(at - measured.began), _ms(gap)] for at, gap in sorted(gaps(measured))],
        "prompts_ms": [
            [_ms(trace.sent - measured.began), *(_ms(at - measured.began) for at in trace.events)]
            for trace in prompts_of(measured)
        ],
        "pods": measured.pods,
        "router_cpu_s": round(measured.router_cpu_s, 4),
        "client_cpu_s": round(measured.client_cpu_s, 4),
        "machine_cpu_s": round(measured.machine_cpu_s, 4),
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def side_rounds(report: Report, side: Side) -> list[Round]:
    """The rounds of one side, in order."""
    return [measured for measured in report.measured.rounds if measured.side == side]
