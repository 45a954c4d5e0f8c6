"""The stages of a run: the toy model under everything, then under lost packets alone, then SmolLM2."""

import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos import cgroups
from tests.chaos.judge import Evidence, Least, findings
from tests.chaos.report import Stage
from tests.chaos.schedule import GAP_S, Fault, Kind, Topology, losses, make_schedule
from tests.chaos.stage import DEADLINE_S, Plan, fresh, run_stage

AROUND_S = 22.0  # of a stage: start, calm, rest, and judging
MEMORY_S = 300.0  # of faults, from which on the slope of memory is judged
LEASE = "3s"

TOY_SPEC: dict[str, Any] = {
    "model": {"name": "toy", "source": "toy:step_ms=5,heads=2,dim=32"},
    "engine": {"kvBlocks": 400, "blockSize": 16, "maxModelLen": 2048, "tokenBudget": 128, "threads": 1},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 2},
    "router": {"auth": "none", "requestDeadline": f"{DEADLINE_S:g}s", "disaggregation": {"minUncachedTokens": 32}},
    "transfer": {"lease": LEASE},
}
SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_SPEC: dict[str, Any] = {
    "model": {"name": SMOLLM2, "source": "demo:smollm2"},
    "engine": {"dtype": "float32", "kvBlocks": 150, "blockSize": 16, "maxModelLen": 512, "threads": 1},
    "prefill": {"replicas": 1},
    "decode": {"replicas": 2},
    "router": {"auth": "none", "requestDeadline": f"{DEADLINE_S:g}s", "disaggregation": {"mode": "always"}},
    "transfer": {"lease": LEASE},
}
# Each has an answer of any length; the last one is long.
SMOLLM2_PROMPTS = (
    "The old ferryman looked over the river and said that",
    "Here is a list of the planets of the solar system, with one sentence about each of them:",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a small harbour where",
    "The three most important rules for a safe crossing are:\n1.",
    "In the year 1869 the first train crossed the river on a ferry, and",
    "Ferry timetable of the lake, spring and summer.\n"
    + "".join(f"{hour:02}:05 from the north pier, {hour:02}:25 from the south pier.\n" for hour in range(6, 18)),
)
TOY_KINDS = tuple(Kind)
SMOLLM2_KINDS = (
    Kind.KILL_POD,
    Kind.KILL_ENGINE,
    Kind.PAUSE_POD,
    Kind.WEDGE_ENGINE,
    Kind.CUT,
    Kind.RESET_TRANSFER,
    Kind.LOSS,
    Kind.THROTTLE,
)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How one stage is run and judged."""

    share: float  # of the time for faults, relative to those of the other stages
    kinds: tuple[Kind, ...]
    gap_s: tuple[float, float]
    whole_per_s: float  # whole answers that a second of faults has to bring
    pieces: int  # of text that the longest of them has at least
    make: Callable[[], Plan]
    judge: Callable[[Evidence], tuple[Evidence, str]]  # the tokens, where the clients have not; and by what
    from_s: float = 0.0  # a shorter run leaves this stage out
    transfers_hit: int = 0  # at least


def _toy() -> Plan:
    return Plan(name="toy", spec=TOY_SPEC, model=TOY_SPEC["model"]["source"], routers=2, clients=32)


def _smollm2() -> Plan:
    from kvferry_runtime.model.fetch import default_root, fetch

    folder = str(fetch(SMOLLM2, default_root(), progress=False))
    return Plan(
        name="smollm2", spec=SMOLLM2_SPEC, model=folder, routers=1, clients=4, prompts=SMOLLM2_PROMPTS, max_tokens=40
    )


def _judged_by_clients(seen: Evidence) -> tuple[Evidence, str]:
    return seen, "the toy's oracle, every token of every answer"


def _judged_by_reference(seen: Evidence) -> tuple[Evidence, str]:
    from kvferry_runtime.model.fetch import default_root, fetch
    from tests.chaos.real import judge_texts

    records = judge_texts(fetch(SMOLLM2, default_root(), progress=False), seen.records)
    return msgspec.structs.replace(seen, records=records), "transformers, every token of every answer"


STAGES: dict[str, Setting] = {
    "toy": Setting(
        share=0.7,
        kinds=TOY_KINDS,
        gap_s=GAP_S,
        whole_per_s=1.3,
        pieces=40,
        make=_toy,
        judge=_judged_by_clients,
        transfers_hit=1,
    ),
    "loss": Setting(
        share=0.12,
        kinds=(Kind.LOSS,),
        gap_s=(0.0, 0.0),  # its schedule is fixed
        whole_per_s=1.3,
        pieces=40,
        make=_toy,
        judge=_judged_by_clients,
        from_s=300.0,
    ),
    "smollm2": Setting(
        share=0.3,
        kinds=SMOLLM2_KINDS,
        gap_s=(2.0, 6.0),
        whole_per_s=0.1,
        pieces=20,
        make=_smollm2,
        judge=_judged_by_reference,
    ),
}


def included(seconds: float) -> list[str]:
    """The stages of a whole run of so many seconds."""
    return [name for name, setting in STAGES.items() if setting.from_s <= seconds]


def fault_seconds(name: str, seconds: float) -> float:
    """How long faults go on in a stage of a whole run of so many seconds."""
    names = {*included(seconds), name}
    share = STAGES[name].share / sum(STAGES[each].share for each in names)
    return max(10.0, (seconds - AROUND_S * len(names)) * share)


def schedule_of(
    name: str, seed: int, seconds: float, topology: Topology, without: Container[Kind] = ()
) -> tuple[Fault, ...]:
    """The faults of a stage in a whole run of so many seconds.

    Args:
        without: kinds that cannot be had here.
    """
    setting, lasts = STAGES[name], fault_seconds(name, seconds)
    kinds = [kind for kind in setting.kinds if kind not in without]
    return losses(lasts) if name == "loss" else make_schedule(seed, lasts, topology, kinds, setting.gap_s)


def missing_here() -> dict[Kind, str]:
    """Kinds of faults that this machine does not allow, and why."""
    reason = cgroups.why_not()
    return {Kind.OOM_KILL: reason} if reason else {}


def least_work(name: str, seconds: float, scheduled: tuple[Kind, ...]) -> Least:
    """What a stage with so many seconds of faults has to have done."""
    setting = STAGES[name]
    return Least(
        whole=int(setting.whole_per_s * seconds),
        faults=int(0.8 * len(scheduled)),
        kinds=frozenset(scheduled),
        transfers_hit=setting.transfers_hit,
        pieces=setting.pieces,
    )


def run_judged(name: str, seed: int, seconds: float, folder: Path, say: Callable[[str], None]) -> Stage:
    """Run one stage of a run of so many seconds, and judge it."""
    setting = STAGES[name]
    plan = msgspec.structs.replace(setting.make(), name=name)
    lasts = fault_seconds(name, seconds)
    missing = {kind: reason for kind, reason in missing_here().items() if kind in setting.kinds}
    schedule = schedule_of(name, seed, seconds, plan.topology, missing)
    seen = run_stage(plan, schedule, seed, fresh(folder), say)
    seen, checked = setting.judge(seen)
    least = least_work(name, lasts, tuple(fault.kind for fault in schedule))
    found = findings(seen, least, judge_memory=lasts >= MEMORY_S)
    return Stage(
        name=name,
        seed=seed,
        schedule=schedule,
        seen=seen,
        findings=tuple(found),
        checked=checked,
        missing={str(kind): reason for kind, reason in missing.items()},
        machine=f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} over the last 5 minutes",
    )
