"""Percentiles, what one round says, and ratios between rounds of one number."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_cli.bench.figures import (
    HAND_OFF,
    ITL,
    TTFT,
    compare,
    first_token_s,
    gap_s,
    percentile,
    second_token_s,
    spread,
    tokens_per_s,
    written,
)
from tests.cli.bench.builders import make_round, make_rounds, make_trace


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 50, 7.0),
        ([7.0], 99, 7.0),
        ([1, 2, 3, 4], 50, 2),
        ([4, 3, 2, 1], 75, 3),
        ([1, 2, 3, 4], 76, 4),
        ([1, 2], 0, 1),
        (range(1, 101), 99, 99),
        (range(1, 102), 99, 100),
        (range(1, 101), 100, 100),
    ],
)
def test_a_percentile_is_one_of_the_values(values: list[float], percent: float, expected: float) -> None:
    """Nearest rank: nothing is invented between two values."""
    assert percentile(values, percent) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_so_many_percent_do_not_exceed_a_percentile(values: list[float], percent: float) -> None:
    """And no smaller value would do."""
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9
    smaller = [value for value in values if value < found]
    assert len(smaller) < percent / 100 * len(values) or not smaller


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_no_values_have_no_percentile(values: list[float], percent: float) -> None:
    """An empty sample is an error, not 0."""
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_a_spread_shows_the_ends() -> None:
    """The median of an even number lies between the middle two."""
    assert spread([4.0, 1.0, 2.0, 9.0]) == spread([1.0, 2.0, 4.0, 9.0])
    assert (spread([4.0, 1.0, 2.0, 9.0]).median, spread([3.0]).low) == (3.0, 3.0)


def test_only_gaps_within_the_window_count() -> None:
    """A gap belongs to the window that holds both its tokens; long prompts' own tokens never do."""
    measured = make_round()
    early = make_trace("early", events=[8.0, 9.0, 10.5, 12.0, 19.0, 21.0])
    prompt = make_trace("long", "prompt", sent=10.0, events=[13.0, 13.5, 13.6])
    measured = type(measured)(
        side="disaggregated",
        number=0,
        began=10.0,
        ended=20.0,
        traces=(early, prompt),
        pods=measured.pods,
        router_cpu_s=0.0,
        client_cpu_s=0.0,
        machine_cpu_s=0.0,
    )
    assert gap_s(measured) == [1.5, 7.0]
    assert first_token_s(measured) == [3.0]
    assert second_token_s(measured) == [0.5]
    assert written(measured) == 6
    assert tokens_per_s(measured) == 0.6


def test_ratios_are_between_rounds_of_one_number() -> None:
    """A machine that is twice as slow in one round changes no ratio, in whatever order the rounds came."""
    rounds = [
        make_round(side, number, first_token_s=seconds * slow)
        for number, slow in enumerate((1.0, 2.0, 1.0))
        for side, seconds in (("disaggregated", 1.0), ("aggregated", 2.0))
    ]
    random.Random(1).shuffle(rounds)
    figure = compare(rounds)[f"{TTFT} p50"]
    assert (figure.ratio.low, figure.ratio.median, figure.ratio.high) == (0.5, 0.5, 0.5)
    assert (figure.disaggregated.high, figure.aggregated.median) == (2000.0, 2000.0)
    assert figure.samples == (3, 3)
    assert figure.reached


def test_the_bars_of_the_project_are_judged() -> None:
    """0.2 for p99 between tokens, 1.2 for the first token."""
    good = compare(make_rounds({"gap_s": 0.1}, {"gap_s": 0.1, "stall_s": 0.6}))
    assert good[f"{ITL} p99"].reached
    bad = compare(make_rounds({"first_token_s": 1.3}, {"first_token_s": 1.0, "stall_s": 0.4}))
    assert not bad[f"{ITL} p99"].reached
    assert not bad[f"{TTFT} p50"].reached
    assert bad[f"{HAND_OFF} p50"].reached is None


def test_a_side_without_rounds_is_an_error() -> None:
    """Nothing is compared with nothing."""
    with pytest.raises(ValueError, match="both sides"):
        compare([make_round()])
    with pytest.raises(ValueError, match="both sides"):
        compare([])
