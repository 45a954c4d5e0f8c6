"""What is not taken, and what the refusal says (B010, B060, B062)."""

import msgspec
import pytest

from kvferry_runtime.core.messages import AbortLeg, Drain, EngineEffect, FailOut, Submit
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.runtime.core.builders import assert_at_rest, make_driver, make_handle, make_submit


def refusal(effects: list[EngineEffect]) -> tuple[str, str]:
    (effect,) = effects
    assert isinstance(effect, FailOut)
    return effect.kind, effect.message


@pytest.mark.parametrize(
    ("submit", "words"),
    [
        (make_submit(prompt=[]), "no token"),
        (make_submit(prompt=64), "the prompt has 64 tokens; the context length is 64 tokens"),
        (make_submit(prompt=60, emitted=[[1] * 5]), "60 + 5 tokens; the context length is 64"),
        (make_submit(n=9), "n is 9; 1 to 8"),
        (make_submit(emitted=[]), "n is 0"),
        (make_submit(max_tokens=0), "max_tokens is 0; at least 1"),
        (make_submit(prompt=[1, -1]), "the prompt hold token id -1; ids from 0 to 999999999"),
        (make_submit(prompt=[10**9]), "token id 1000000000"),
        (make_submit(emitted=[[10**9]]), "the emitted ids hold token id 1000000000"),
        (make_submit(kind="prefill", handle=make_handle(6)), "prefill leg carries a KV handle"),
    ],
)
def test_a_leg_that_cannot_be_served_is_invalid_and_says_why(submit: Submit, words: str) -> None:
    """The message names what was given and what is accepted; nothing is kept of the leg."""
    driver = make_driver(vocab_size=10**9)
    kind, message = refusal(driver.send(submit))
    assert kind == "invalid"
    assert words in message
    assert_at_rest(driver.core)


def test_two_live_legs_of_one_name_cannot_be() -> None:
    """B010: the second is refused, the first is untouched; another attempt is another leg."""
    driver = make_driver()
    submit = make_submit("r", 6, max_tokens=3)
    driver.send(submit)
    driver.step()
    assert refusal(driver.send(submit))[0] == "invalid"
    assert driver.send(make_submit("r", 6, attempt=1, max_tokens=3)) == []
    driver.run()
    assert sorted(driver.ids("r")) == [10_006, 10_006, 10_007, 10_007, 10_008, 10_008]
    assert driver.send(submit) == []


def test_the_queue_has_a_cap() -> None:
    """Waiting legs beyond it are told to come back; running ones do not count."""
    limits = msgspec.structs.replace(DEFAULT_LIMITS, queue=2)
    driver = make_driver(limits=limits, max_running=1)
    driver.send(make_submit("running", 2))
    driver.step()
    assert driver.send(make_submit("a"), make_submit("b", handle=make_handle(6), emitted=[[9]])) != []
    assert refusal(driver.send(make_submit("c"))) == ("busy", "2 requests wait; at most 2 may")


def test_a_leg_that_arrives_after_its_abort_is_cancelled_for_a_minute() -> None:
    """The tombstone also meets legs that were never seen, is per attempt, and ends."""
    driver = make_driver()
    submit = make_submit("r")
    assert driver.send(AbortLeg(key=submit.key), AbortLeg(key=submit.key)) == []
    driver.now = 59.0
    assert refusal(driver.send(submit))[0] == "cancelled"
    assert driver.send(make_submit("r", attempt=1)) == []
    driver.now = 60.0
    assert driver.send(submit) == []


def test_tombstones_are_capped() -> None:
    """The oldest is forgotten first."""
    limits = msgspec.structs.replace(DEFAULT_LIMITS, tombstones=3)
    driver = make_driver(limits=limits)
    for number in range(5):
        driver.send(AbortLeg(key=make_submit(f"r{number}").key))
    outcomes = [bool(driver.send(make_submit(f"r{number}", 2))) for number in range(5)]
    assert outcomes == [False, False, True, True, True]


def test_a_draining_engine_takes_nothing_new_and_ends_what_it_has() -> None:
    """Drain refuses with its own kind, and shows in the load."""
    driver = make_driver()
    driver.send(make_submit("a"), Drain(), Drain())
    assert refusal(driver.send(make_submit("b")))[0] == "draining"
    driver.run()
    assert len(driver.ids("a")) == 4
    assert driver.core.load().draining


def test_no_time_left_is_a_deadline() -> None:
    """A leg that arrives late is not started."""
    driver = make_driver()
    assert refusal(driver.send(make_submit(deadline=0.0)))[0] == "deadline"


def test_events_between_schedule_and_commit_are_a_programming_error() -> None:
    """The shell's order of calls is checked, since blocks of a step in progress must not move."""
    driver = make_driver()
    driver.send(make_submit("r"))
    plan, _ = driver.core.schedule(0.0)
    assert plan is not None
    with pytest.raises(RuntimeError, match="step 1 is not committed"):
        driver.core.handle(AbortLeg(key=make_submit("r").key), 0.0)
    with pytest.raises(RuntimeError, match="step 1 is not committed"):
        driver.core.schedule(0.0)
    failed = driver.core.abandon(plan, "out of order")
    assert refusal(failed) == ("internal", "out of order")
    assert_at_rest(driver.core)
