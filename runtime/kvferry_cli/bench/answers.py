"""Whether answers are right: what both sides say must be the same, and what differs or was drawn must be judged. Pure.

Batch sizes change the last bits of the scores, so that two right answers may differ from a near tie on: the reference
decides. A few answers that do not differ are judged as well, so that one mistake on both sides is noticed.
"""

import random
from collections.abc import Sequence

import msgspec

from kvferry_cli.bench.records import Round, Trace

SAMPLED = 1  # answers of each kind and side that are judged though nothing differs


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that the reference is asked about."""

    side: str
    trace: Trace
    differs: bool  # from the other side's answer to the same request


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What comparing the sides said."""

    answers: int  # with any text
    equal: int  # requests that both sides answered alike, as far as both went
    single: int  # answers without a counterpart
    doubts: tuple[Doubt, ...]


def compare_answers(rounds: Sequence[Round], seed: int) -> Compared:
    """Compare the sides' answers request by request."""
    by_request: dict[str, dict[str, Trace]] = {}
    for measured in rounds:
        for trace in measured.traces:
            if trace.text:
                by_request.setdefault(trace.request.name, {})[measured.side] = trace
    doubts: list[Doubt] = []
    equal = single = 0
    for answers in by_request.values():
        if len(answers) == 1:
            single += 1
        elif _agree(*answers.values()):
            equal += 1
        else:
            doubts += [Doubt(side=side, trace=trace, differs=True) for side, trace in answers.items()]
    known = {(doubt.side, doubt.trace.request.name) for doubt in doubts}
    doubts += [doubt for doubt in _sample(rounds, seed) if (doubt.side, doubt.trace.request.name) not in known]
    total = sum(len(answers) for answers in by_request.values())
    return Compared(answers=total, equal=equal, single=single, doubts=tuple(doubts))


def _agree(one: Trace, other: Trace) -> bool:
    if one.complete and other.complete:
        return one.text == other.text
    return one.text.startswith(other.text) or other.text.startswith(one.text)


def _sample(rounds: Sequence[Round], seed: int) -> list[Doubt]:
    """Some answers of each kind and side."""
    source = random.Random(f"{seed}: sample")
    found: list[Doubt] = []
    for side in sorted({measured.side for measured in rounds}):
        for kind in ("prompt", "stream"):
            traces = [
                trace
                for measured in rounds
                if measured.side == side
                for trace in measured.traces
                if trace.request.kind == kind and trace.text
            ]
            drawn = source.sample(traces, min(SAMPLED, len(traces)))
            found += [Doubt(side=side, trace=trace, differs=False) for trace in drawn]
    return found
