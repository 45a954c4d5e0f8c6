"""Small rounds for tests: times in seconds from 0."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry_cli.bench.load import Kind, LoadSpec, Request
from kvferry_cli.bench.manifests import SIDES, Side
from kvferry_cli.bench.records import PodUse, Round, Trace

LOAD = LoadSpec(
    streams=2,
    stream_prompt_tokens=4,
    stream_tokens=8,
    prompts=2,
    prompt_tokens=20,
    answer_tokens=3,
    pause_s=0.1,
    rounds=2,
    seed=0,
)


def make_trace(
    name: str = "a", kind: Kind = "stream", *, sent: float = 0.0, events: Sequence[float] = (), **changes: Any
) -> Trace:
    """A finished answer with a letter for each event."""
    request = Request(name=name, kind=kind, prompt_ids=tuple(range(20)), answer_tokens=len(events))
    trace = Trace(request=request, sent=sent, path="disaggregated", events=list(events), text="x" * len(events))
    trace.finish, trace.completion_tokens = "length", len(events)
    for field, value in changes.items():
        setattr(trace, field, value)
    return trace


def make_pod(name: str = "decode-0", **changes: Any) -> PodUse:
    role = name.partition("-")[0]
    pod = PodUse(
        name=name,
        role=role,
        cores=(0,),
        threads=1,
        cpu_s=5.0,
        pulls=0,
        pull_s=0.0,
        pull_bytes=0,
        pulls_failed=0,
        recomputed=0,
        preemptions=0,
    )
    return msgspec.structs.replace(pod, **changes)


def make_round(
    side: Side = "disaggregated",
    number: int = 0,
    *,
    first_token_s: float = 1.0,
    gap_s: float = 0.1,
    stall_s: float = 0.1,
    pods: Sequence[PodUse] = (),
) -> Round:
    """Ten seconds with one long prompt and one stream whose tokens come evenly, but for five late ones."""
    prompt = make_trace("p", "prompt", events=[first_token_s, first_token_s + 0.2], path=side)
    at, events = 0.0, []
    while at < 9.5:
        at += stall_s if len(events) in (2, 4, 6, 8, 10) else gap_s
        events.append(at)
    return Round(
        side=side,
        number=number,
        began=0.0,
        ended=10.0,
        traces=(prompt, make_trace("s", events=events, path=side)),
        pods=tuple(pods) or (make_pod("prefill-0"), make_pod("decode-0")),
        router_cpu_s=0.1,
        client_cpu_s=0.1,
        machine_cpu_s=14.0,
    )


def make_rounds(ours: dict[str, Any], theirs: dict[str, Any], count: int = 3) -> list[Round]:
    """So many equal rounds of both sides."""
    whole = (make_pod("decode-0"), make_pod("decode-1"))
    sides: dict[Side, dict[str, Any]] = {SIDES[0]: ours, SIDES[1]: {"pods": whole, **theirs}}
    return [make_round(side, number, **values) for number in range(count) for side, values in sides.items()]
