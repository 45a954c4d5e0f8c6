"""The plain verdict: whether disaggregation pays under a load, and if not, why; each reason from the figures."""

from typing import Any

import msgspec
import pytest

from kvferry_cli.bench.figures import compare
from kvferry_cli.bench.verdict import CAUTIONS, REASONS, Facts, Verdict, facts_of, judge
from tests.cli.bench.builders import make_pod, make_round, make_rounds

FACTS = Facts(
    cores=2,
    engine_threads=2,
    pinned=True,
    prefill_busy=0.8,
    decode_busy=0.8,
    aggregated_busy=0.8,
    split_share=1.0,
    recomputed=0,
    pull_s=0.05,
    hand_off_s=0.1,
    first_token_s=1.0,
    stall=8.0,
    front_cores=0.01,
    foreign_share=0.0,
    preemptions=0,
)
STALLS = {"stall_s": 0.6}


def verdict(ours: dict[str, Any], theirs: dict[str, Any], **facts: Any) -> Verdict:
    return judge(compare(make_rounds(ours, theirs)), msgspec.structs.replace(FACTS, **facts))


def test_it_pays_when_streams_are_calmer_and_nothing_is_worse() -> None:
    """No reason is needed then."""
    found = verdict({"gap_s": 0.1}, {"gap_s": 0.1, **STALLS}, prefill_busy=0.3)
    assert (found.pays, found.reasons, found.losses) == ("yes", (), ())
    assert found.gains[0].startswith("inter-token latency p99: 0.17 times that of aggregated")


def test_it_pays_in_part_when_something_is_worse() -> None:
    """Calm streams, bought with a later first token."""
    found = verdict({"first_token_s": 2.0}, STALLS)
    assert found.pays == "in part"
    assert found.losses[0].startswith("time to first token p50: 2.00 times")


@pytest.mark.parametrize("theirs", [{}, {"first_token_s": 0.5}])
def test_it_does_not_pay_without_a_gain(theirs: dict[str, Any]) -> None:
    """Whether it is as good or worse; something is said in either case."""
    found = verdict({}, theirs)
    assert found.pays == "no"
    assert "does not pay on this machine under this load" in found.headline
    assert found.reasons


def test_a_gain_in_some_rounds_only_is_none() -> None:
    """Noise: the ratio's spread holds 1."""
    rounds = [
        make_round(side, number, first_token_s=seconds)
        for number, pair in enumerate(((0.5, 1.0), (0.8, 1.0), (1.1, 1.0)))
        for side, seconds in zip(("disaggregated", "aggregated"), pair, strict=True)
    ]
    assert judge(compare(rounds), FACTS).pays == "no"


REASON_FACTS: dict[str, dict[str, Any]] = {
    "nothing was split": {"split_share": 0.5},
    "KV was not usable": {"recomputed": 3},
    "shared cores": {"engine_threads": 4},
    "nothing to win": {"stall": 1.5},
    "decode is full": {"decode_busy": 0.97},
    "prefill is idle": {"prefill_busy": 0.2},
    "prefill is full": {"prefill_busy": 0.98},
    "the ferry is slow": {"pull_s": 0.4},
    "the second token is late": {"hand_off_s": 0.9},
}
CAUTION_FACTS: dict[str, dict[str, Any]] = {
    "other work": {"foreign_share": 0.3},
    "the front shares": {"front_cores": 0.2},
    "not pinned": {"pinned": False},
    "KV is full": {"preemptions": 2},
    "few prompts": {},
}
WORSE = {"first_token_s": 2.0}


@pytest.mark.parametrize("name", [because.name for because in REASONS])
def test_each_reason_is_told_when_its_figure_says_so(name: str) -> None:
    """In words with the number, beside a verdict that is not yes."""
    because = next(each for each in REASONS if each.name == name)
    facts = msgspec.structs.replace(FACTS, **REASON_FACTS[name])
    rounds = make_rounds(WORSE, {})
    for measured in rounds:
        if name == "the second token is late" and measured.side == "disaggregated":
            measured.traces[0].events[1] += 0.7
    figures = compare(rounds)
    assert because.words(facts, figures) in judge(figures, facts).reasons
    assert because.words(facts, figures) not in judge(compare(make_rounds(WORSE, {})), FACTS).reasons


@pytest.mark.parametrize("name", [because.name for because in CAUTIONS])
def test_each_caution_is_told_whatever_the_verdict(name: str) -> None:
    """What limits the figures is said also where they look good."""
    because = next(each for each in CAUTIONS if each.name == name)
    facts = msgspec.structs.replace(FACTS, **CAUTION_FACTS[name])
    figures = compare(make_rounds({}, STALLS))
    found = judge(figures, facts)
    assert found.pays == "yes"
    assert because.words(facts, figures) in found.cautions


def test_facts_are_sums_over_all_rounds() -> None:
    """Busy shares over the threads' time, means over all pulls, foreign time beside ours."""
    ours = (
        make_pod("prefill-0", cpu_s=9.0),
        make_pod("decode-0", cpu_s=4.0, pulls=2, pull_s=0.3, recomputed=1, cores=()),
    )
    facts = facts_of(make_rounds({"pods": ours}, STALLS), cores=2)
    assert (facts.prefill_busy, facts.decode_busy, facts.aggregated_busy) == (0.9, 0.4, 0.5)
    # 0.3 s of each round were spent on a prompt and a stream's prompt of the same length.
    assert (facts.pull_s, facts.recomputed, facts.pinned, facts.engine_threads) == (0.15, 3, False, 2)
    assert facts.split_share == 1.0
    assert facts.stall == pytest.approx(6.0)
    assert facts.front_cores == pytest.approx(0.02)
    ours_s, theirs_s, machine_s = 9.0 + 4.0 + 0.2, 5.0 + 5.0 + 0.2, 14.0
    assert facts.foreign_share == pytest.approx((2 * machine_s - ours_s - theirs_s) / (2 * 20))
