"""Ends of choices: end of sequence, stop ids, lengths (B037, B038, B039)."""

import pytest

from kvferry_runtime.core.messages import TokensOut
from tests.runtime.core.builders import EOS, assert_at_rest, make_driver, make_submit


def last_out(driver: object) -> TokensOut:
    return [e for e in driver.effects if isinstance(e, TokensOut)][-1]


def run_with(ids: list[int], **fields: object) -> tuple[list[int], TokensOut]:
    """A leg whose k-th pick is ids[k]."""
    driver = make_driver()
    driver.token = lambda row, pick: ids[pick.position - 6]
    driver.send(make_submit("r", 6, **fields))
    driver.run()
    assert_at_rest(driver.core)
    return driver.ids("r"), last_out(driver)


@pytest.mark.parametrize(("max_tokens", "finish"), [(3, "stop"), (2, "length"), (4, "stop")])
def test_an_end_of_sequence_on_the_last_allowed_token_is_a_stop(max_tokens: int, finish: str) -> None:
    """B038: the third pick is end-of-sequence."""
    ids, out = run_with([50, 51, EOS, 52], max_tokens=max_tokens)
    assert out.finish == finish
    assert ids == [50, 51, EOS][:max_tokens]


def test_a_secondary_end_of_sequence_ends_too_and_names_no_token() -> None:
    """B039: end-of-sequence ids are not the user's stop ids."""
    _, out = run_with([50, 9, 51, 52], eos=(EOS, 9))
    assert (out.ids, out.finish, out.stop_token) == ((9,), "stop", None)


def test_a_stop_id_of_the_user_is_named() -> None:
    """B039: the integer that ended it, also when it is an end-of-sequence id that the user named."""
    _, out = run_with([50, 77, 51], stop_token_ids=(77,))
    assert (out.finish, out.stop_token) == ("stop", 77)
    _, out = run_with([50, EOS, 51], stop_token_ids=(EOS,), ignore_eos=True)
    assert (out.finish, out.stop_token) == ("stop", EOS)


def test_an_ignored_end_of_sequence_is_a_token_like_others() -> None:
    """``ignore_eos`` runs to max_tokens."""
    ids, out = run_with([EOS, EOS, EOS, EOS], ignore_eos=True)
    assert len(ids) == 4
    assert out.finish == "length"


def test_before_min_tokens_all_end_and_stop_ids_are_banned() -> None:
    """B037: every end-of-sequence id and every stop id, for exactly the first min_tokens picks."""
    driver = make_driver()
    driver.send(make_submit("r", 6, eos=(EOS, 9), stop_token_ids=(77, 9), min_tokens=3, max_tokens=5))
    driver.run()
    banned = [pick.banned for plan in driver.plans for row in plan.rows for pick in row.picks]
    assert banned == [(EOS, 9, 77)] * 3 + [()] * 2


def test_min_tokens_counts_what_was_emitted_before_a_resume() -> None:
    """Ids that a leg brings along count."""
    driver = make_driver()
    driver.send(make_submit("r", 6, emitted=[[50, 51]], min_tokens=3, max_tokens=5))
    driver.run()
    banned = [pick.banned for plan in driver.plans for row in plan.rows for pick in row.picks]
    assert banned == [(EOS,), (), ()]


def test_the_context_length_ends_an_answer_with_length() -> None:
    """The sequence has max_model_len tokens, prompt included, and not one more."""
    driver = make_driver(max_model_len=10)
    driver.send(make_submit("r", 6, max_tokens=100))
    driver.run()
    assert len(driver.ids("r")) == 4
    assert driver.finish("r") == "length"


@pytest.mark.parametrize(
    ("emitted", "finish", "stop_token"),
    [([50, EOS], "stop", None), ([77], "stop", 77), ([50] * 4, "length", None)],
)
def test_ids_that_end_a_choice_already_are_answered_without_ids(
    emitted: list[int], finish: str, stop_token: int | None
) -> None:
    """A resumed leg whose answer was complete computes nothing."""
    driver = make_driver()
    submit = make_submit("r", 6, emitted=[emitted], stop_token_ids=(77,))
    (out,) = driver.send(submit)
    assert out == TokensOut(key=submit.key, choice=0, ids=(), finish=finish, stop_token=stop_token)
    assert driver.step() == []
    assert_at_rest(driver.core)


def test_the_other_choices_go_on_when_one_is_over_already() -> None:
    """One finish at once, one normal answer."""
    driver = make_driver()
    (out,) = driver.send(make_submit("r", 6, emitted=[[EOS], [50]], max_tokens=3))
    assert isinstance(out, TokensOut)
    assert (out.choice, out.finish) == (0, "stop")
    driver.run()
    assert driver.ids("r", 1) == [10_007, 10_008]
    assert_at_rest(driver.core)
