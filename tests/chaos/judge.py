"""The verdict: from what was seen to what is wrong. Pure; a run passes if nothing is found.

A harness that saw nothing passes nothing: too few requests, faults or kinds are findings too.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tests.chaos.asked import Record
from tests.chaos.faults import Applied
from tests.chaos.schedule import LONG_WEDGE_S, OF_TRANSFERS, Kind
from tests.chaos.service import Death, Held, Memory, RouterHeld
from tests.chaos.wire import Hit

NEAR_S = 2.0  # between an event and its note
AFTERMATH_S = 40.0  # in which a restarted pod may still be starting, and a wedged engine be killed by its server
LATE_S = 15.0  # over the service's deadline: a busy machine, a router that was paused
LOSSY_SUCCESS = {0.05: 1.0, 0.2: 0.99}  # share of packets lost -> share of requests answered whole, at least
SLOPE_BAR = 1.0  # percent of its memory a minute
SLOPE_LIFE_S = 150.0  # a shorter life says nothing
SLOPE_WARM_S = 45.0  # first requests, caches and pools
SHOWN = 5  # findings of one kind that are told whole
OF_PROCESSES = frozenset(
    {Kind.KILL_POD, Kind.KILL_ENGINE, Kind.OOM_KILL, Kind.KILL_DECODES, Kind.KILL_ROUTER}
    | {Kind.PAUSE_POD, Kind.PAUSE_ROUTER, Kind.WEDGE_ENGINE}
)
ROUTER_GONE = frozenset({Kind.KILL_ROUTER, Kind.RESTART_ROUTER})


class Least(msgspec.Struct, frozen=True, kw_only=True):
    """The work below which a run proves nothing."""

    whole: int  # answers
    faults: int  # that hit something
    kinds: frozenset[Kind]  # each at least once
    transfers_hit: int
    pieces: int  # of text, in the longest whole answer


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """How one process's memory went over its life. What fills up to a bound is no growth: a leak goes on to the end."""

    pod: str
    part: str
    life_s: float
    mbytes: float  # mean
    percent_per_min: float


class UnderLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests that began while a share of all packets was lost, and nothing else was wrong."""

    share: float
    asked: int
    whole: int
    expired: int  # whose lease ended before it was read


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that was seen in one stage. Times are of time.monotonic."""

    records: Sequence[Record]
    applied: Sequence[Applied]
    deaths: Sequence[Death]
    hits: Sequence[Hit]
    memory: Sequence[Memory]
    held: Sequence[Held]  # after the last answer
    router_held: Sequence[RouterHeld]
    tracebacks: Sequence[str]
    not_ready: str  # why the service was not whole again after the faults, or ""
    left_clients: bool  # some were still reading when their time was over
    begun_at: float  # of the faults
    calm_at: float  # from here on everything was whole and no fault was left
    ended_at: float
    deadline_s: float


def findings(seen: Evidence, least: Least, *, judge_memory: bool) -> list[str]:
    """All that breaks a promise, one line each; empty: the run has passed.

    Args:
        judge_memory: whether the slope of memory is held against its bar; it takes minutes to mean something.
    """
    found = [*_wrong(seen), *_ends(seen), *_restarts(seen), *_rest(seen), *_calm(seen), *_lossy(seen)]
    found += _work(seen, least)
    if judge_memory:
        found += [
            f"memory of {slope.pod} {slope.part} grows by {slope.percent_per_min:.2f} % a minute"
            for slope in slopes(seen.memory)
            if slope.percent_per_min > SLOPE_BAR
        ]
    return found


def _shown(what: str, each: Sequence[str]) -> Iterator[str]:
    yield from (f"{what}: {one}" for one in each[:SHOWN])
    if len(each) > SHOWN:
        yield f"{what}: {len(each) - SHOWN} more"


def _wrong(seen: Evidence) -> Iterator[str]:
    """No wrong token, no false end, no error of another shape."""
    yield from _shown("wrong", [f"{_name(each)}: {each.wrong}" for each in seen.records if each.wrong])
    yield from _shown(
        "[DONE] on an answer that is not whole",
        [_name(each) for each in seen.records if each.done and not each.whole and not each.wrong],
    )


def _ends(seen: Evidence) -> Iterator[str]:
    """Each request ended by its deadline, with a right end or an explicit error, unless its router went away."""
    mute = [each for each in seen.records if each.silent == "hung"]
    yield from _shown("no end in time", [_name(each) for each in mute])
    late = [each for each in seen.records if each not in mute and each.ended - each.begun > seen.deadline_s + LATE_S]
    yield from _shown("ended late", [f"{_name(each)}, {each.ended - each.begun:.1f} s" for each in late])
    silent = [each for each in seen.records if each.silent in ("cut", "refused") and not _router_went(seen, each)]
    yield from _shown("ended without a word", [f"{_name(each)}: {each.silent} by {each.router}" for each in silent])
    if seen.left_clients:
        yield "some clients never came to an end"


def _router_went(seen: Evidence, record: Record) -> bool:
    """Whether the router was ended by a fault while it had the request."""
    return any(
        each.fault.kind in ROUTER_GONE
        and record.router in each.fault.targets
        and each.at - NEAR_S <= record.ended
        and record.begun <= each.healed_at + (AFTERMATH_S if record.silent == "refused" else NEAR_S)
        for each in seen.applied
    )


def _restarts(seen: Evidence) -> Iterator[str]:
    """No process ended, and no exception was logged, that no fault was the cause of."""
    for death in seen.deaths:
        if not any(_explains(applied, death) for applied in seen.applied):
            yield f"{death.pod} {death.part} ended by itself (status {death.status}) {_at(seen, death.at)}"
        elif death.asked and death.part == "server" and death.status and not _harmed(seen, death):
            yield f"{death.pod} was asked to end and did so with status {death.status} {_at(seen, death.at)}"
    for applied in seen.applied:
        if _outlasts_patience(seen, applied) and not any(_answers(death, applied) for death in seen.deaths):
            yield f"the engine of {applied.fault.targets[0]}, wedged {_at(seen, applied.at)}, was never replaced"
    yield from _shown("logged", list(seen.tracebacks))


def _outlasts_patience(seen: Evidence, applied: Applied) -> bool:
    """Whether an engine stood still for longer than its server may watch it, which a paused server does not."""
    if applied.fault.kind is not Kind.WEDGE_ENGINE or not applied.hit:
        return False
    paused = sum(
        max(0.0, min(each.healed_at, applied.healed_at) - max(each.at, applied.at))
        for each in seen.applied
        if each.fault.kind is Kind.PAUSE_POD and each.hit and each.fault.targets == applied.fault.targets
    )
    return applied.healed_at - applied.at - paused >= LONG_WEDGE_S - NEAR_S


def _answers(death: Death, applied: Applied) -> bool:
    return death.pod in applied.fault.targets and applied.at <= death.at <= applied.healed_at + NEAR_S


def _explains(applied: Applied, death: Death) -> bool:
    kind, fault = applied.fault.kind, applied.fault
    if death.pod not in fault.targets or not applied.at - NEAR_S <= death.at <= applied.healed_at + AFTERMATH_S:
        return False
    match kind:
        case Kind.KILL_ENGINE | Kind.WEDGE_ENGINE:
            return death.part == "engine"
        case Kind.PAUSE_POD:  # woken, a server may find its engine silent for too long
            return death.part == "engine"
        case Kind.OOM_KILL:  # on a machine that is slow to lift the limit the kernel ends the server as well
            return death.at <= applied.healed_at + NEAR_S
        case Kind.KILL_POD | Kind.KILL_DECODES | Kind.KILL_ROUTER | Kind.RESTART_POD | Kind.RESTART_ROUTER:
            return death.at <= applied.healed_at + NEAR_S
        case _:
            return False


def _harmed(seen: Evidence, death: Death) -> bool:
    """Whether another fault hit the same pod's processes while it was ending."""
    return any(
        death.pod in each.fault.targets
        and each.fault.kind in OF_PROCESSES
        and each.at <= death.at <= each.healed_at + AFTERMATH_S
        for each in seen.applied
    )


def _rest(seen: Evidence) -> Iterator[str]:
    """At rest every block is free and nothing is held."""
    for held in seen.held:
        if (held.running, held.waiting, held.leases) != (0, 0, 0) or held.free_blocks != held.total_blocks:
            yield f"held at rest: {held}"
    for router in seen.router_held:
        if any(router.gauges.values()):
            yield f"held at rest: {router}"
    if not seen.held or not seen.router_held:
        yield "nobody said what is held at rest"


def _calm(seen: Evidence) -> Iterator[str]:
    """When all is whole again, every request is answered whole."""
    if seen.not_ready:
        yield f"the service was not whole again after the faults: {seen.not_ready}"
        return
    calm = [each for each in seen.records if each.begun >= seen.calm_at]
    failed = [f"{_name(each)}: {each.status} {each.error or each.silent}" for each in calm if not each.whole]
    yield from _shown("failed although all was well", failed)
    if not calm:
        yield "nothing was asked after the faults"


def _lossy(seen: Evidence) -> Iterator[str]:
    """Lost packets alone cost next to no answer, and a few of them no lease before its time."""
    for each in under_loss_alone(seen):
        if not each.asked or each.whole / each.asked < LOSSY_SUCCESS[each.share]:
            yield f"at {each.share:.0%} loss {each.whole} of {each.asked} requests were answered whole"
        if each.share == min(LOSSY_SUCCESS) and each.expired:
            yield f"at {each.share:.0%} loss {each.expired} leases expired"


def _work(seen: Evidence, least: Least) -> Iterator[str]:
    """Enough was done to prove anything."""
    whole = sum(each.whole for each in seen.records)
    if whole < least.whole:
        yield f"too little work: {whole} whole answers of {len(seen.records)}; {least.whole} are needed"
    longest = max((each.pieces for each in seen.records if each.whole), default=0)
    if longest < least.pieces:
        yield f"too little work: {longest} pieces of text in the longest answer; {least.pieces} are needed"
    hit = [each for each in seen.applied if each.hit]
    if len(hit) < least.faults:
        yield f"too little work: {len(hit)} faults that hit; {least.faults} are needed"
    if missing := least.kinds - {each.fault.kind for each in hit}:
        yield f"too little work: no fault of the kinds {', '.join(sorted(missing))}"
    if len(seen.hits) < least.transfers_hit:
        yield f"too little work: {len(seen.hits)} transfers were hit under way; {least.transfers_hit} are needed"


def under_loss_alone(seen: Evidence) -> list[UnderLoss]:
    """For each share of lost packets, of a stage that had no other fault; empty for any other stage."""
    if any(each.fault.kind is not Kind.LOSS for each in seen.applied):
        return []
    found = []
    for applied in seen.applied:
        asked = [each for each in seen.records if applied.at <= each.begun <= applied.healed_at]
        found.append(
            UnderLoss(
                share=applied.fault.value,
                asked=len(asked),
                whole=sum(each.whole for each in asked),
                expired=sum(each.recomputed == "lease_expired" for each in asked),
            )
        )
    return found


def _name(record: Record) -> str:
    return f"request {record.client}/{record.number}"


def _at(seen: Evidence, at: float) -> str:
    return f"at {at - seen.begun_at:.1f} s"


def slopes(memory: Iterable[Memory]) -> list[Slope]:
    """Of processes that lived long enough: least squares over what they held after their first time.

    The smaller one counts of the slope of that time and the slope of its second half.
    """
    lives: dict[tuple[str, str, int], list[Memory]] = defaultdict(list)
    for sample in memory:
        lives[sample.pod, sample.part, sample.pid].append(sample)
    found = []
    for (pod, part, _), samples in sorted(lives.items()):
        life = samples[-1].at - samples[0].at
        points = [(each.at, each.nbytes) for each in samples if each.at - samples[0].at >= SLOPE_WARM_S]
        if life >= SLOPE_LIFE_S and len(points) > 3:
            mean = sum(nbytes for _, nbytes in points) / len(points)
            rate = min(_rate(points), _rate(points[len(points) // 2 :]))
            percent = 100 * 60 * rate / mean
            found.append(Slope(pod=pod, part=part, life_s=life, mbytes=mean / 2**20, percent_per_min=percent))
    return found


def _rate(points: Sequence[tuple[float, int]]) -> float:
    """Bytes a second, by least squares."""
    mean_at = sum(at for at, _ in points) / len(points)
    mean = sum(nbytes for _, nbytes in points) / len(points)
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    return sum((at - mean_at) * (nbytes - mean) for at, nbytes in points) / spread


def counted(records: Iterable[Record], what: str) -> Counter[str]:
    """How often each value of a field came, empty ones left out; of ``resumed``, each of its causes."""
    values = (getattr(record, what) for record in records)
    if what == "resumed":
        return Counter(cause for causes in values for cause in causes)
    return Counter(value for value in values if value)


def kinds_of_transfers_hit(seen: Evidence) -> Counter[str]:
    """Faults of transfers that hit one under way, by kind."""
    kinds = {each.fault.number: each.fault.kind for each in seen.applied if each.fault.kind in OF_TRANSFERS}
    return Counter(str(kinds[hit.fault]) for hit in seen.hits if hit.fault in kinds)
