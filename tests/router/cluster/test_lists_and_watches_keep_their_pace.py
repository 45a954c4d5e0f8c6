"""When to list and to watch, and how soon again: every legal edge, every illegal pair, any API server. Pure."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_router.discovery.list_watch import (
    TRANSITIONS,
    Heard,
    IllegalStepError,
    ListNow,
    ListWatch,
    PauseUntil,
    Phase,
    WatchFrom,
)
from kvferry_wire.limits import Limits

LIMITS = Limits()
CALLS = {
    Heard.LISTED: lambda flow: flow.listed("7", 0.0),
    Heard.WORD: lambda flow: flow.word("8", 0.0),
    Heard.ENDED: lambda flow: flow.ended(0.0),
    Heard.FAILED: lambda flow: flow.failed(0.0),
    Heard.GONE: lambda flow: flow.gone(0.0),
    Heard.DUE: lambda flow: flow.due(),
}
WAYS = {
    Phase.LISTING: (),
    Phase.WATCHING: (Heard.LISTED,),
    Phase.BEFORE_LIST: (Heard.FAILED,),
    Phase.BEFORE_WATCH: (Heard.LISTED, Heard.ENDED),
}


def make_flow(now: float = 0.0, **limits: Any) -> ListWatch:
    return ListWatch(Limits(**limits), Random(1), now)


def make_watching(version: str = "7", now: float = 0.0) -> ListWatch:
    """A flow whose watch has begun."""
    flow = make_flow(now)
    assert flow.step(now) == ListNow()
    flow.listed(version, now)
    step = flow.step(now)
    assert isinstance(step, WatchFrom)
    assert step.version == version
    flow.opened(now)
    return flow


def pause_of(flow: ListWatch, now: float) -> float:
    step = flow.step(now)
    assert isinstance(step, PauseUntil)
    return step.at - now


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.name)
@pytest.mark.parametrize("heard", list(Heard), ids=lambda heard: heard.name)
def test_every_pair_of_phase_and_event_is_in_the_table_or_refused(phase: Phase, heard: Heard) -> None:
    """An event that does not belong changes nothing."""
    flow = make_flow()
    for step in WAYS[phase]:
        CALLS[step](flow)
    assert flow.phase is phase
    after = TRANSITIONS.get((phase, heard))
    if after is None:
        with pytest.raises(IllegalStepError, match=heard.value):
            CALLS[heard](flow)
        assert flow.phase is phase
    else:
        CALLS[heard](flow)
        assert flow.phase is after


def test_a_watch_goes_on_from_the_last_version_heard() -> None:
    """Events and bookmarks move it; an event without one does not."""
    flow = make_watching("7")
    flow.word("9", 1.0)
    flow.word("", 1.0)
    flow.ended(60.0)
    flow.due()
    step = flow.step(60.0)
    assert isinstance(step, WatchFrom)
    assert step.version == "9"
    assert 0.8 * LIMITS.api_watch_s <= step.seconds <= LIMITS.api_watch_s


def test_a_forgotten_version_is_listed_anew_after_a_moment() -> None:
    """410, or an event that cannot be read."""
    flow = make_watching()
    flow.gone(10.0)
    assert flow.phase is Phase.BEFORE_LIST
    assert 0 < pause_of(flow, 10.0) <= LIMITS.api_backoff_s
    flow.due()
    assert flow.step(10.3) == ListNow()


def test_a_watch_that_ends_in_order_is_taken_up_at_once() -> None:
    """Nothing is missed by then: it goes on from its version."""
    flow = make_watching()
    flow.ended(1.0)
    assert pause_of(flow, 1.0) == 0.0


def test_a_watch_that_ends_at_once_and_says_nothing_is_a_failure() -> None:
    """An API server, or something before it, that closes every watch is not asked in a circle."""
    flow, now, pauses = make_watching(), 0.0, []
    for _ in range(12):
        flow.ended(now)
        pauses.append(pause_of(flow, now))
        now += pauses[-1]
        flow.due()
        flow.step(now)
        flow.opened(now)
    assert pauses[-1] >= LIMITS.api_backoff_cap_s / 2
    assert max(pauses) <= LIMITS.api_backoff_cap_s
    assert all(later > earlier * 0.9 for earlier, later in pairwise(pauses[1:7]))


def test_failures_back_off_up_to_a_cap_and_a_word_starts_over() -> None:
    """An API server that was away for minutes is found again within seconds of the cap."""
    flow, now = make_flow(), 0.0
    for _ in range(40):
        flow.failed(now)
        now += pause_of(flow, now)
        flow.due()
        assert flow.step(now) == ListNow()
    flow.failed(now)
    assert LIMITS.api_backoff_cap_s / 2 <= pause_of(flow, now) <= LIMITS.api_backoff_cap_s
    flow.due()
    flow.listed("1", now)
    flow.step(now)
    flow.opened(now)
    flow.word("2", now)
    flow.failed(now)
    assert pause_of(flow, now) <= LIMITS.api_backoff_s


def test_a_long_watch_that_breaks_starts_over_too() -> None:
    """It was of use, though nothing had happened."""
    flow = make_watching(now=0.0)
    for _ in range(6):
        flow.failed(0.0)
        flow.due()
        flow.step(0.0)
    flow.opened(0.0)
    flow.failed(100.0)
    assert pause_of(flow, 100.0) <= LIMITS.api_backoff_s


def test_the_api_servers_wish_to_be_left_alone_is_granted_within_reason() -> None:
    """Retry-After, up to a minute."""
    flow = make_flow()
    flow.failed(0.0, 7.0)
    assert pause_of(flow, 0.0) == 7.0
    flow.due()
    flow.failed(0.0, 86_400.0)
    assert pause_of(flow, 0.0) == 60.0


def test_away_is_told_by_the_time_without_a_word() -> None:
    """An open watch is a word that lasts; a closed one counts from its end."""
    flow = make_flow(now=100.0)
    assert not flow.away(104.9)
    assert flow.away(105.0)
    flow = make_watching(now=0.0)
    assert not flow.away(1000.0)
    assert flow.silence(1000.0) == 1000.0
    flow.ended(1000.0)
    assert not flow.away(1004.9)
    assert flow.away(1005.0)
    flow.due()
    flow.step(1006.0)
    assert flow.away(1006.0)
    flow.opened(1006.0)
    assert not flow.away(1006.0)


def test_a_watch_that_was_silent_for_long_is_not_yet_an_api_server_that_is_away() -> None:
    """Where nothing happens some say nothing. Only when the next watch does not begin either, it is."""
    flow = make_watching(now=0.0)
    flow.failed(75.0)
    assert pause_of(flow, 75.0) <= LIMITS.api_backoff_s
    assert not flow.away(79.9)
    assert flow.away(80.0)
    assert flow.silence(80.0) == 80.0


def test_only_a_watch_can_begin() -> None:
    """A shell that says otherwise is at fault."""
    with pytest.raises(IllegalStepError, match="listing"):
        make_flow().opened(0.0)


OUTCOMES = st.sampled_from(["ok", "word", "end", "fail", "gone", "throttled"])


@settings(max_examples=200)
@given(st.lists(st.tuples(OUTCOMES, st.sampled_from([0.0, 0.001, 0.2, 1.0, 6.0])), max_size=80), st.integers(0, 99))
def test_no_api_server_makes_it_ask_more_than_ten_times_in_a_second(
    history: list[tuple[str, float]], seed: int
) -> None:
    """Whatever it answers, and however soon."""
    flow, now, calls = ListWatch(LIMITS, Random(seed), 0.0), 0.0, []
    for outcome, took in history:
        step = flow.step(now)
        if isinstance(step, PauseUntil):
            assert step.at <= now + 60.0
            now = max(now, step.at)
            flow.due()
            continue
        calls.append(now)
        now += took
        match step, outcome:
            case ListNow(), "fail" | "gone":
                flow.failed(now)
            case _, "throttled":
                flow.failed(now, 1.0)
            case ListNow(), _:
                flow.listed("1", now)
            case _, "gone":
                flow.gone(now)
            case _, "fail":
                flow.failed(now)
            case _, "word":
                flow.opened(now)
                flow.word("2", now)
                flow.ended(now)
            case _:
                flow.opened(now)
                flow.ended(now)
    for first, eleventh in zip(calls, calls[11:], strict=False):
        assert eleventh - first > 1.0
