"""The verdict finds what a wrong service would do, one planted fault at a time, and what a harness would leave out."""

import json
from collections.abc import Callable
from dataclasses import replace as with_fields

import msgspec
import pytest

from tests.chaos import report
from tests.chaos.asked import Record
from tests.chaos.clients import Reading, finished
from tests.chaos.faults import Applied
from tests.chaos.judge import Evidence, Least, findings, slopes
from tests.chaos.report import Stage, percentile
from tests.chaos.schedule import Fault, Kind
from tests.chaos.service import Death, Held, Memory, RouterHeld
from tests.chaos.wire import Hit
from tests.processes.asking import Answer, Ask

LEAST = Least(whole=3, faults=2, kinds=frozenset({Kind.KILL_POD, Kind.RESET_TRANSFER}), transfers_hit=1, pieces=5)
replace = msgspec.structs.replace


def record(number: int, begun: float, **changes: object) -> Record:
    whole = Record(
        client=0, number=number, router="router-0", begun=begun, ended=begun + 1, status=200, whole=True, done=True,
        pieces=8, path="disaggregated", gap_s=0.1,
    )  # fmt: skip
    return replace(whole, **changes)


def applied(kind: Kind, targets: tuple[str, ...], at: float, healed_at: float, number: int = 0) -> Applied:
    fault = Fault(number=number, kind=kind, at=at, until=healed_at, targets=targets)
    return Applied(fault=fault, at=at, healed_at=healed_at, hit=True)


def held(pod: str, **changes: int) -> Held:
    return replace(Held(pod=pod, running=0, waiting=0, leases=0, free_blocks=100, total_blocks=100), **changes)


GOOD = Evidence(
    records=[record(1, 3), record(2, 8, resumed=("dead",), gap_s=1.5), record(3, 20), record(4, 51)],
    applied=[
        applied(Kind.KILL_POD, ("decode-0",), 5, 6),
        applied(Kind.RESET_TRANSFER, ("prefill-0",), 10, 13, number=1),
        applied(Kind.KILL_ROUTER, ("router-1",), 30, 31, number=2),
    ],
    deaths=[
        Death(pod="decode-0", part="server", at=5.1, status=-9, asked=False),
        Death(pod="router-1", part="server", at=30.1, status=-9, asked=False),
    ],
    hits=[Hit(fault=1, at=11.0)],
    memory=[],
    held=[held("prefill-0"), held("decode-0")],
    router_held=[RouterHeld(pod="router-0", gauges={"router_bookings": 0.0})],
    tracebacks=[],
    not_ready="",
    left_clients=False,
    begun_at=0.0,
    calm_at=50.0,
    ended_at=60.0,
    deadline_s=40.0,
)


def also(seen: Evidence, **changes: object) -> Evidence:
    """With one more of something."""
    return replace(seen, **{name: [*getattr(seen, name), value] for name, value in changes.items()})


def test_what_is_right_passes() -> None:
    """An explicit error is no finding, nor is a stream that its own router's death cut."""
    assert findings(GOOD, LEAST, judge_memory=True) == []
    error = record(5, 6, whole=False, done=False, error="engine_lost")
    cut = record(6, 29.5, whole=False, done=False, silent="cut", router="router-1")
    refused = record(7, 30.5, status=0, whole=False, done=False, silent="refused", router="router-1")
    assert findings(replace(GOOD, records=[*GOOD.records, error, cut, refused]), LEAST, judge_memory=True) == []


def test_a_paused_server_watches_nobody() -> None:
    """Of a wedge of 24 s the server saw 21, which its patience may outlast."""
    wedged = also(GOOD, applied=applied(Kind.WEDGE_ENGINE, ("decode-1",), 10, 34, number=3))
    assert (
        findings(also(wedged, applied=applied(Kind.PAUSE_POD, ("decode-1",), 20, 23, 4)), LEAST, judge_memory=True)
        == []
    )
    other = also(wedged, applied=applied(Kind.PAUSE_POD, ("decode-0",), 20, 23, 4))
    assert findings(other, LEAST, judge_memory=True) != []


def test_the_kernel_ends_what_a_memory_limit_leaves_no_room_for() -> None:
    """That is no death by itself; one that comes long after it is."""
    full = also(GOOD, applied=applied(Kind.OOM_KILL, ("decode-1",), 40, 40.5, number=3))

    def ended(at: float) -> list[str]:
        death = Death(pod="decode-1", part="engine", at=at, status=None, asked=False)
        return findings(also(full, deaths=death), LEAST, judge_memory=False)

    assert ended(40.4) == []
    assert ended(45.0) == ["decode-1 engine ended by itself (status None) at 45.0 s"]


PLANTED: dict[str, tuple[Callable[[], Evidence], str]] = {
    "a wrong token": (
        lambda: also(GOOD, records=record(5, 9, wrong="not a prefix", whole=False)),
        "wrong: request 0/5",
    ),
    "[DONE] on a cut answer": (
        lambda: also(GOOD, records=record(5, 9, whole=False, error="x")),
        "[DONE] on an answer that is not whole",
    ),
    "a stream that hangs": (
        lambda: also(GOOD, records=record(5, 9, ended=70, silent="hung", whole=False, done=False)),
        "no end in time",
    ),
    "an end after the deadline": (
        lambda: also(GOOD, records=record(5, 9, ended=70)),
        "ended late: request 0/5, 61.0 s",
    ),
    "a cut without a word": (
        lambda: also(GOOD, records=record(5, 9, silent="cut", whole=False, done=False)),
        "ended without a word: request 0/5: cut by router-0",
    ),
    "a cut by another router than the one that died": (
        lambda: also(GOOD, records=record(5, 29.5, silent="cut", whole=False, done=False)),
        "ended without a word",
    ),
    "a cut long after the router's death": (
        lambda: also(GOOD, records=record(5, 40, silent="cut", whole=False, done=False, router="router-1")),
        "ended without a word",
    ),
    "an engine that crashes": (
        lambda: also(GOOD, deaths=Death(pod="decode-1", part="engine", at=20.0, status=None, asked=False)),
        "decode-1 engine ended by itself (status None) at 20.0 s",
    ),
    "a server that ends while another pod is killed": (
        lambda: also(GOOD, deaths=Death(pod="decode-1", part="server", at=5.1, status=1, asked=False)),
        "decode-1 server ended by itself (status 1)",
    ),
    "an ordered end with a bad status": (
        lambda: also(
            also(GOOD, applied=applied(Kind.RESTART_POD, ("prefill-0",), 40, 42, number=3)),
            deaths=Death(pod="prefill-0", part="server", at=41.0, status=1, asked=True),
        ),
        "prefill-0 was asked to end and did so with status 1",
    ),
    "a wedged engine that nobody replaces": (
        lambda: also(GOOD, applied=applied(Kind.WEDGE_ENGINE, ("decode-1",), 10, 34, number=3)),
        "the engine of decode-1, wedged at 10.0 s, was never replaced",
    ),
    "an exception in a log": (lambda: replace(GOOD, tracebacks=["decode-0: Traceback"]), "logged: decode-0: Traceback"),
    "a leaked block": (lambda: also(GOOD, held=held("decode-1", free_blocks=99)), "held at rest: Held(pod='decode-1'"),
    "a leaked lease": (lambda: also(GOOD, held=held("prefill-1", leases=1)), "held at rest"),
    "a request that never left an engine": (lambda: also(GOOD, held=held("decode-1", waiting=1)), "held at rest"),
    "a booking that stays": (
        lambda: also(GOOD, router_held=RouterHeld(pod="router-1", gauges={"router_bookings": 1.0})),
        "held at rest: RouterHeld(pod='router-1'",
    ),
    "a service that does not recover": (lambda: replace(GOOD, not_ready="decode-0: refused"), "was not whole again"),
    "an error although all is well": (
        lambda: also(GOOD, records=record(5, 52, status=503, whole=False, done=False, error="unavailable")),
        "failed although all was well: request 0/5: 503 unavailable",
    ),
    "clients that never end": (lambda: replace(GOOD, left_clients=True), "some clients never came to an end"),
    "no audit": (lambda: replace(GOOD, held=[]), "nobody said what is held at rest"),
    "too few answers": (lambda: replace(GOOD, records=GOOD.records[2:]), "2 whole answers of 2; 3 are needed"),
    "short answers alone": (
        lambda: replace(GOOD, records=[replace(each, pieces=1) for each in GOOD.records]),
        "1 pieces of text in the longest answer",
    ),
    "nothing asked afterwards": (lambda: replace(GOOD, records=[*GOOD.records[:3]]), "nothing was asked after"),
    "too few faults": (lambda: replace(GOOD, applied=GOOD.applied[:1]), "1 faults that hit; 2 are needed"),
    "faults that hit nothing": (
        lambda: replace(GOOD, applied=[replace(each, hit=False) for each in GOOD.applied]),
        "0 faults that hit; 2 are needed",
    ),
    "a kind left out": (lambda: replace(GOOD, applied=GOOD.applied[1:]), "no fault of the kinds kill_pod"),
    "no transfer hit": (lambda: replace(GOOD, hits=[]), "0 transfers were hit under way; 1 are needed"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str) -> None:
    """By its own words, and in the report."""
    make, told = PLANTED[name]
    seen = make()
    found = findings(seen, LEAST, judge_memory=True)
    assert any(told in each for each in found), found
    assert told in report.as_text([stage(seen, found)], "make chaos SEED=7 SECONDS=120")


def stage(seen: Evidence, found: list[str]) -> Stage:
    schedule = tuple(each.fault for each in seen.applied)
    return Stage(
        name="toy",
        seed=7,
        schedule=schedule,
        seen=seen,
        findings=tuple(found),
        checked="the oracle",
        missing={"oom_kill": "no cgroups"},
        machine="2 cores, load 1.0",
    )


def test_growing_memory_is_found_only_where_it_is_judged() -> None:
    """3 MiB a minute on 100 are 3 %; a life of a minute says nothing, nor does growth before the first requests."""

    def grown(life_s: int, mib_per_min: float) -> list[Memory]:
        return [
            Memory(pod="decode-1", part="engine", pid=1, at=at, nbytes=int((100 + mib_per_min * at / 60) * 2**20))
            for at in range(0, life_s, 2)
        ]

    assert slopes(grown(60, 9.0)) == []
    filled = [replace(each, nbytes=min(each.nbytes, 106 * 2**20)) for each in grown(240, 3.0)]  # a ring, full halfway
    (slope,) = slopes(filled)
    assert slope.percent_per_min < 0.1
    (slope,) = slopes(grown(300, 3.0))
    assert 2.5 < slope.percent_per_min < 3.0
    leaking, steady = replace(GOOD, memory=grown(300, 3.0)), replace(GOOD, memory=grown(300, 0.5))
    (found,) = findings(leaking, LEAST, judge_memory=True)
    assert "memory of decode-1 engine grows by 2.8" in found or "by 2.7" in found, found
    assert findings(leaking, LEAST, judge_memory=False) == findings(steady, LEAST, judge_memory=True) == []


def test_lost_packets_alone_cost_next_to_nothing() -> None:
    """Every request at 5 %, 99 of 100 at a fifth, and no lease at 5 %."""

    def lossy(share: float, failed: int, recomputed: str = "") -> list[str]:
        lost = applied(Kind.LOSS, (), 5, 25)
        lost = replace(lost, fault=replace(lost.fault, value=share))
        error = {"whole": False, "done": False, "error": "engine_lost"}
        records = [record(each, 6, **(error if each < failed else {})) for each in range(100)]
        records.append(record(100, 7, recomputed=recomputed))
        seen = replace(GOOD, applied=[lost], deaths=[], records=[*records, record(101, 51)])
        return findings(seen, replace(LEAST, faults=1, kinds=frozenset(), whole=90), judge_memory=False)

    assert lossy(0.05, 0) == lossy(0.2, 1) == lossy(0.2, 0, "lease_expired") == lossy(0.05, 0, "read_error") == []
    assert lossy(0.05, 1) == ["at 5% loss 100 of 101 requests were answered whole"]
    assert lossy(0.2, 3) == ["at 20% loss 98 of 101 requests were answered whole"]
    assert lossy(0.05, 0, "lease_expired") == ["at 5% loss 1 leases expired"]


ASK = Ask("A prompt. ", max_tokens=6)
TEXT = ASK.expected[0][0]
USAGE = {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16, "prompt_tokens_details": {"cached_tokens": 0}}


def read(*events: object, broken: bool = False, comment: str = "") -> Record:
    """The record of a stream of these events."""
    reading = Reading(ASK)
    reading.answer = Answer(200, "disaggregated", [""], [None], broken=broken)
    lines = [each if isinstance(each, str) else json.dumps(each) for each in events]
    reading.body = "".join(f"data: {line}\n\n" for line in lines).encode() + comment.encode()
    reading.times = [10.0, 10.5, 12.5]
    return finished(record(1, 9.0, whole=False, pieces=0), ASK, reading, real=False)


def text(piece: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def test_clients_judge_every_token() -> None:
    """The oracle's own text passes; one altered character does not, nor does [DONE] on a part of it."""
    usage = {"choices": [], "usage": USAGE}
    right = read(text(TEXT[:3]), text(TEXT[3:], "length"), usage, "[DONE]")
    assert (right.whole, right.wrong, right.silent, right.error, right.gap_s) == (True, "", "", "", 2.0)
    altered = TEXT[:2] + chr(ord(TEXT[2]) ^ 1) + TEXT[3:]
    assert "not a prefix" in read(text(altered, "length"), usage, "[DONE]").wrong
    assert "clean end on a cut answer" in read(text(TEXT[:3], "length"), usage, "[DONE]").wrong
    cut = read(text(TEXT[:3]), broken=True)
    assert (cut.whole, cut.wrong, cut.silent) == (False, "", "cut")
    error = {"error": {"message": "m", "type": "server_error", "param": None, "code": "engine_lost"}}
    told = read(text(TEXT[:3]), error, broken=True)
    assert (told.whole, told.wrong, told.silent, told.error) == (False, "", "", "engine_lost")
    assert read(text(TEXT[:3]), error).wrong


def test_clients_tell_of_resumes_and_recomputes() -> None:
    """As the comments before a stream's end say it."""
    notes = ": kvferry recomputed: read_error\n\n: kvferry resumed: dead, stalled\n\n"
    seen = read(text(TEXT[:3]), broken=True, comment=notes)
    assert (seen.resumed, seen.recomputed) == (("dead", "stalled"), "read_error")


def test_a_failed_run_can_be_replayed_from_its_report() -> None:
    """The command with the seed, and the schedule; the JSON beside it says the same."""
    seen = also(GOOD, records=record(5, 9, wrong="not a prefix", whole=False))
    failed = stage(seen, findings(seen, LEAST, judge_memory=False))
    told = report.as_text([failed], "make chaos SEED=7 SECONDS=120")
    assert "again: make chaos SEED=7 SECONDS=120" in told
    assert "#0   kill_pod decode-0 for 1.0 s" in told
    assert "FAILED" in told
    document = json.loads(report.as_json([failed], "make chaos"))
    assert document["passed"] is False
    assert document["stages"]["toy"]["wrong"] == 1
    assert document["stages"]["toy"]["schedule"][0]["kind"] == "kill_pod"


def test_the_outcomes_of_a_report_add_up() -> None:
    """Each request is counted once, with its reason where it was not answered; what was left out is told."""
    seen = replace(
        GOOD,
        records=[
            *GOOD.records,
            record(5, 6, whole=False, done=False, error="engine_lost"),
            record(6, 29.5, whole=False, done=False, silent="cut", router="router-1"),
            record(7, 9, whole=False, done=False, silent="hung"),
        ],
    )
    told = report.as_text([stage(seen, [])], "make chaos")
    assert (
        "7: 4 answered whole, 1 ended in an explicit error (1 engine_lost), "
        "1 lost their router (1 cut), 1 hung, 0 wrong"
    ) in told
    assert "left out: oom_kill: no cgroups" in told
    assert "of those whose leg was dead: p50 1.50 s" in told
    assert "2 cores, load 1.0" in told


def test_percentiles_are_of_nearest_rank() -> None:
    """The p99 of few values is their largest."""
    assert [percentile([3.0, 1.0, 2.0], each) for each in (50, 99)] == [2.0, 3.0]
    assert percentile([float(each) for each in range(1, 201)], 99) == 198.0
    assert percentile([], 50) == 0.0


def test_an_ask_of_a_real_model_is_judged_by_its_form() -> None:
    """Its text is kept for the reference; what is no right end is wrong at once."""
    reading = Reading(ASK)
    reading.answer = Answer(200, "disaggregated", [""], [None])
    body = [text("Any text", "length"), {"choices": [], "usage": USAGE}]
    reading.body = "".join(f"data: {json.dumps(each)}\n\n" for each in body).encode() + b"data: [DONE]\n\n"
    seen = finished(record(1, 9.0, whole=False), with_fields(ASK, max_tokens=2), reading, real=True)
    assert (seen.whole, seen.prompt, seen.text) == (True, ASK.prompt, "Any text")
