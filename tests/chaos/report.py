"""What a person reads after a run, and the same for machines. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.chaos.judge import Evidence, counted, kinds_of_transfers_hit, slopes
from tests.chaos.schedule import Fault


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a run, judged."""

    name: str
    seed: int
    schedule: tuple[Fault, ...]
    seen: Evidence
    findings: tuple[str, ...]
    checked: str  # what judged the tokens


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
    return {
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
        "gap_of_resumed_s": _spread([each.gap_s for each in resumed]),
        "first_text_s": _spread([each.first_s for each in records if each.pieces]),
        "faults": len(hit),
        "faults_by_kind": dict(Counter(str(each.fault.kind) for each in hit)),
        "transfers_hit": dict(kinds_of_transfers_hit(seen)),
        "processes_ended": len(seen.deaths),
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
    parts = ["Chaos on real processes", f"  again: {command}", ""]
    parts += [_stage_text(stage) for stage in stages]
    parts.append("PASSED: no wrong token, no hung stream, nothing leaked." if passed else "FAILED, see the findings.")
    return "\n".join(parts)


def _stage_text(stage: Stage) -> str:
    found = figures(stage)
    rows = [
        ("requests", f"{found['requests']}, {found['whole']} answered whole, by path {_counts(found['paths'])}"),
        ("tokens", f"wrong: {found['wrong']}; judged by {found['tokens_judged_by']}"),
        ("resumed", f"{found['resumed']} answers, {_counts(found['resumed_by_cause'])}"),
        ("recomputed", _counts(found["recomputed_by_reason"])),
        ("errors", f"explicit {_counts(found['explicit_errors'])}; without a word {_counts(found['without_a_word'])}"),
        ("longest gap", f"of an answer: {_seconds(found['gap_s'])}; resumed: {_seconds(found['gap_of_resumed_s'])}"),
        ("first text", _seconds(found["first_text_s"])),
        ("faults", f"{found['faults']} in {found['storm_s']} s: {_counts(found['faults_by_kind'])}"),
        ("transfers hit", _counts(found["transfers_hit"])),
        ("at rest", f"leaks: {found['leaks']}; {found['processes_ended']} processes ended in the run"),
    ]
    rows += [
        (
            "memory",
            f"{each['pod']} {each['part']}: {each['percent_per_min']:+.2f} %/min of {each['mbytes']:.0f} MiB "
            f"over {each['life_s']:.0f} s",
        )
        for each in found["memory"]
    ]
    lines = [f"{stage.name}, seed {stage.seed}", *(f"  {name:14} {value}" for name, value in rows)]
    if stage.findings:
        lines += ["  FINDINGS", *(f"  - {each}" for each in stage.findings)]
        lines += ["  SCHEDULE", *(f"  {fault.told()}" for fault in stage.schedule)]
    return "\n".join([*lines, ""])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda each: -each[1])) or "none"


def _seconds(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in spread.items())
