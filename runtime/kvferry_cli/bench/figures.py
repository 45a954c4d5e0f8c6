"""From rounds to figures: a number per round, then the median over the rounds and their spread. Pure.

A ratio is disaggregated over aggregated, taken between the rounds of one number, which ran one after the other.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from kvferry_cli.bench.manifests import Side
from kvferry_cli.bench.records import Round, Trace

Better = Literal["less", "more"]


class Spread(msgspec.Struct, frozen=True):
    """The median of some rounds, and the least and the largest."""

    median: float
    low: float
    high: float


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the comparison."""

    name: str
    unit: str
    better: Better
    disaggregated: Spread
    aggregated: Spread
    ratio: Spread
    samples: tuple[int, int]  # that each side's number rests on, over all rounds
    bar: float | None  # what the ratio shall be at most

    @property
    def reached(self) -> bool | None:
        """Whether the bar was reached; ``None`` without one."""
        return None if self.bar is None else self.ratio.median <= self.bar

    @property
    def won(self) -> bool:
        """Disaggregated is clearly better: by a tenth, and in every round."""
        return self.ratio.median <= 0.9 and self.ratio.high < 1 if self.better == "less" else self._larger()

    @property
    def lost(self) -> bool:
        """Disaggregated is clearly worse."""
        return self._larger() if self.better == "less" else self.ratio.median <= 0.9 and self.ratio.high < 1

    def _larger(self) -> bool:
        return self.ratio.median >= 1.1 and self.ratio.low > 1


def percentile(values: Iterable[float], percent: float) -> float:
    """The least value that at least so many percent of the values do not exceed (nearest rank).

    Raises ``ValueError`` for no values, or a percentage outside 0..100.
    """
    ordered = sorted(values)
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(ordered)} values")
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> Spread:
    """Median, least and largest. Raises ``ValueError`` for no values."""
    if not values:
        raise ValueError("no values")
    return Spread(statistics.median(values), min(values), max(values))


# ---- what one round says -------------------------------------------------------------------------------------------


def prompts_of(measured: Round) -> list[Trace]:
    """The long prompts' requests."""
    return [trace for trace in measured.traces if trace.request.kind == "prompt"]


def first_token_s(measured: Round) -> list[float]:
    """Seconds to the first token of each long prompt."""
    return [trace.events[0] - trace.sent for trace in prompts_of(measured) if trace.events]


def second_token_s(measured: Round) -> list[float]:
    """Seconds from the first to the second token of each long prompt: what the hand-off adds shows here."""
    return [trace.events[1] - trace.events[0] for trace in prompts_of(measured) if len(trace.events) > 1]


def gaps(measured: Round) -> list[tuple[float, float]]:
    """Of the running streams, within the window: when a token came, and how long after the one before it."""
    return [
        (later, later - earlier)
        for trace in measured.traces
        if trace.request.kind == "stream"
        for earlier, later in itertools.pairwise(trace.events)
        if measured.began <= earlier and later <= measured.ended
    ]


def gap_s(measured: Round) -> list[float]:
    """Seconds between tokens of the running streams, within the window."""
    return [gap for _, gap in gaps(measured)]


def written(measured: Round) -> int:
    """Tokens that all clients got within the window."""
    return sum(measured.began < at <= measured.ended for trace in measured.traces for at in trace.events)


def tokens_per_s(measured: Round) -> float:
    """Tokens written per second."""
    return written(measured) / measured.window_s


def prompt_tokens_per_s(measured: Round) -> float:
    """Tokens of long prompts computed per second."""
    return sum(len(trace.request.prompt_ids) for trace in prompts_of(measured)) / measured.window_s


# ---- the comparison ------------------------------------------------------------------------------------------------


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """How a figure is made."""

    name: str
    unit: str
    better: Better
    of: Callable[[Round], float]
    samples: Callable[[Round], int]
    bar: float | None = None


def _percentile_line(
    name: str, values: Callable[[Round], list[float]], percent: float, bar: float | None = None
) -> _Line:
    return _Line(
        name=f"{name} p{percent:g}",
        unit="ms",
        better="less",
        of=lambda measured: 1000 * percentile(values(measured), percent),
        samples=lambda measured: len(values(measured)),
        bar=bar,
    )


TTFT_BAR, ITL_BAR = 1.2, 0.2
TTFT, ITL, HAND_OFF = "time to first token", "inter-token latency", "first to second token"

LINES: tuple[_Line, ...] = (
    _percentile_line(TTFT, first_token_s, 50, TTFT_BAR),
    _percentile_line(TTFT, first_token_s, 99, TTFT_BAR),
    _percentile_line(ITL, gap_s, 50),
    _percentile_line(ITL, gap_s, 99, ITL_BAR),
    _percentile_line(HAND_OFF, second_token_s, 50),
    _Line(name="tokens written", unit="1/s", better="more", of=tokens_per_s, samples=written),
    _Line(
        name="prompt tokens computed",
        unit="1/s",
        better="more",
        of=prompt_tokens_per_s,
        samples=lambda measured: len(prompts_of(measured)),
    ),
)


def compare(rounds: Sequence[Round]) -> dict[str, Figure]:
    """All figures by name.

    Raises:
        ValueError: a round lacks its other side, or what a figure is made of.
    """
    ours, theirs = _of_side(rounds, "disaggregated"), _of_side(rounds, "aggregated")
    if [measured.number for measured in ours] != [measured.number for measured in theirs] or not ours:
        raise ValueError("each round needs both sides")
    return {line.name: _figure(line, ours, theirs) for line in LINES}


def _of_side(rounds: Sequence[Round], side: Side) -> list[Round]:
    return sorted((measured for measured in rounds if measured.side == side), key=lambda measured: measured.number)


def _figure(line: _Line, ours: Sequence[Round], theirs: Sequence[Round]) -> Figure:
    values = [(line.of(our), line.of(their)) for our, their in zip(ours, theirs, strict=True)]
    if not all(their > 0 for _, their in values):
        raise ValueError(f"{line.name}: 0 on the aggregated side")
    return Figure(
        name=line.name,
        unit=line.unit,
        better=line.better,
        disaggregated=spread([our for our, _ in values]),
        aggregated=spread([their for _, their in values]),
        ratio=spread([our / their for our, their in values]),
        samples=(sum(map(line.samples, ours)), sum(map(line.samples, theirs))),
        bar=line.bar,
    )
