"""What a person reads after a run, and the same for machines. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry_wire.limits import DEFAULT_LIMITS
from tests.chaos.judge import Evidence, counted, kinds_of_transfers_hit, slopes, under_loss_alone
from tests.chaos.schedule import Fault

# Whoever reads seconds in a report wants to know what they were held against.
NOTICED = {"stalled": f" ({DEFAULT_LIMITS.stall_timeout_s:g} s of silence first)"}
NOT_JUDGED = (
    "Seconds are told, not judged: many clients and several faults at once fill the machine. One fault at a time\n"
    "is held to its bar (docs/testing.md: R001, R003, R005, R006) by\n"
    "tests/processes/test_deaths_are_passed_over_in_time.py."
)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a run, judged."""

    name: str
    seed: int
    schedule: tuple[Fault, ...]
    seen: Evidence
    findings: tuple[str, ...]
    checked: str  # what judged the tokens
    missing: dict[str, str]  # kinds of faults that could not be had, and why
    machine: str  # on which machine, and how busy it was


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)] if ordered else 0.0


def figures(stage: Stage) -> dict[str, Any]:
    """The figures of a stage."""
    seen = stage.seen
    records = seen.records
    resumed = [each for each in records if each.resumed]
    hit = [each for each in seen.applied if each.hit]
    gaps = {cause: [each.gap_s for each in resumed if cause in each.resumed] for cause in counted(resumed, "resumed")}
    return {
        "machine": stage.machine,
        "requests": len(records),
        "whole": sum(each.whole for each in records),
        "tokens_judged_by": stage.checked,
        "wrong": sum(bool(each.wrong) for each in records),
        "explicit_errors": dict(counted(records, "error")),
        "without_a_word": dict(counted(records, "silent")),
        "paths": dict(counted(records, "path")),
        "resumed": len(resumed),
        "resumed_by_cause": dict(counted(resumed, "resumed")),
        "recomputed_by_reason": dict(counted(records, "recomputed")),
        "gap_s": _spread([each.gap_s for each in records if each.pieces > 1]),
        "gap_by_cause_of_resume_s": {cause: _spread(each) for cause, each in gaps.items()},
        "first_text_s": _spread([each.first_s for each in records if each.pieces]),
        "faults": len(hit),
        "faults_by_kind": dict(Counter(str(each.fault.kind) for each in hit)),
        "faults_left_out": stage.missing,
        "under_loss_alone": [msgspec.to_builtins(each) for each in under_loss_alone(seen)],
        "transfers_hit": dict(kinds_of_transfers_hit(seen)),
        "ended_by_pod": dict(Counter(f"{each.pod} {each.part}" for each in seen.deaths)),
        "leaks": sum("held at rest" in each for each in stage.findings),
        "memory": [msgspec.to_builtins(each) for each in slopes(seen.memory)],
        "storm_s": round(seen.calm_at - seen.begun_at, 1),
        "findings": list(stage.findings),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        name: round(value, 3)
        for name, value in (
            ("p50", percentile(values, 50)),
            ("p99", percentile(values, 99)),
            ("max", max(values, default=0.0)),
        )
    }


def as_json(stages: Sequence[Stage], command: str) -> bytes:
    """Everything, with the faults as they happened."""
    document = {
        "command": command,
        "passed": not any(stage.findings for stage in stages),
        "stages": {
            stage.name: figures(stage)
            | {"seed": stage.seed, "schedule": [msgspec.to_builtins(fault) for fault in stage.schedule]}
            for stage in stages
        },
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def as_text(stages: Sequence[Stage], command: str) -> str:
    """The report. With findings, the schedules are in it and the command that replays them."""
    passed = not any(stage.findings for stage in stages)
    verdict = "PASSED: no wrong token, no hung stream, nothing leaked" if passed else "FAILED, see the findings"
    parts = [f"Chaos on real processes: {verdict}.", f"  again: {command}", ""]
    parts += [_stage_text(stage) for stage in stages]
    return "\n".join([*parts, NOT_JUDGED])


def _stage_text(stage: Stage) -> str:
    found = figures(stage)
    rows = [
        ("machine", found["machine"]),
        ("requests", f"{found['requests']}: {_outcomes(found)}"),
        ("tokens", f"{found['wrong']} answers with a wrong one; judged by {found['tokens_judged_by']}"),
        ("ways", _counts(found["paths"])),
        ("recomputed", f"by decode, whose pull failed: {_counts(found['recomputed_by_reason'])}"),
        ("resumed", f"{found['resumed']} answers, whose legs were lost as {_counts(found['resumed_by_cause'])}"),
        ("longest pause", f"of an answer: {_seconds(found['gap_s'])}"),
        *(
            ("", f"of those whose leg was {cause}{NOTICED.get(cause, '')}: {_seconds(spread)}")
            for cause, spread in found["gap_by_cause_of_resume_s"].items()
        ),
        ("first text", f"after {_seconds(found['first_text_s'])}"),
        ("faults", f"{found['faults']} in {found['storm_s']} s: {_counts(found['faults_by_kind'])}"),
        *(("", f"left out: {kind}: {reason}") for kind, reason in found["faults_left_out"].items()),
        ("transfers hit", f"under way: {_counts(found['transfers_hit'])}"),
        *(
            (
                f"at {each['share']:.0%} loss",
                f"{each['whole']} of {each['asked']} requests answered whole, {each['expired']} leases expired",
            )
            for each in found["under_loss_alone"]
        ),
        ("ended", f"{_counts(found['ended_by_pod'])}"),
        ("at rest", f"{found['leaks']} pods or routers still held something"),
        *(
            (
                "memory",
                f"{each['pod']} {each['part']}: {each['percent_per_min']:+.2f} %/min of {each['mbytes']:.0f} MiB "
                f"over {each['life_s']:.0f} s",
            )
            for each in found["memory"]
        ),
    ]
    lines = [f"{stage.name}, seed {stage.seed}", *(f"  {name:14} {value}" for name, value in rows)]
    if stage.findings:
        lines += ["  FINDINGS", *(f"  - {each}" for each in stage.findings)]
        lines += ["  SCHEDULE", *(f"  {fault.told()}" for fault in stage.schedule)]
    return "\n".join([*lines, ""])


def _outcomes(found: Mapping[str, Any]) -> str:
    """Every request is in one of these, so that they add up."""
    errors, silent = found["explicit_errors"], found["without_a_word"]
    parts = [f"{found['whole']} answered whole", f"{sum(errors.values())} ended in an explicit error"]
    parts[1] += f" ({_counts(errors)})" if errors else ""
    gone = {how: count for how, count in silent.items() if how != "hung"}
    parts.append(f"{sum(gone.values())} lost their router" + (f" ({_counts(gone)})" if gone else ""))
    return ", ".join([*parts, f"{silent.get('hung', 0)} hung", f"{found['wrong']} wrong"])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1])) or "none"


def _seconds(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in spread.items())
