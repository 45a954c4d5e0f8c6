"""Running first, first come first served, preemption from the tail (B011)."""

import pytest

from kvferry_runtime.core.messages import FailOut
from tests.runtime.core.builders import assert_at_rest, make_config, make_driver, make_submit, rows_of


def names(driver_plan: object, numbers: dict[int, str]) -> list[str]:
    return [numbers[row.sequence] for row in driver_plan.rows]


def test_a_preempted_request_is_readmitted_before_those_that_never_ran() -> None:
    """B011: the last admitted gives way, waits at the head of the queue, and returns before B's followers."""
    driver = make_driver(blocks=9, max_running=2)
    for name in ("a", "b", "c", "d"):
        driver.send(make_submit(name, 12, max_tokens=16))
    driver.step()
    numbers = {1: "a", 2: "b", 3: "c", 4: "d"}
    assert names(driver.plan, numbers) == ["a", "b"]
    while driver.core.preemptions == 0:
        driver.step()
    assert names(driver.plan, numbers) == ["a"]
    order: list[str] = []
    for _ in range(200):
        driver.step()
        for name in names(driver.plan, numbers):
            if name not in order:
                order.append(name)
        if len(order) == 4:
            break
    assert order == ["a", "b", "c", "d"]
    driver.run()
    for name in ("a", "b", "c", "d"):
        assert driver.ids(name) == [10_000 + 12 + index for index in range(16)]
    assert_at_rest(driver.core)


def test_a_preempted_request_recomputes_what_it_emitted_and_picks_no_position_again() -> None:
    """Emitted ids are input: the recompute covers them, and each position is picked once."""
    driver = make_driver(blocks=9, prefix_caching=False)
    driver.send(make_submit("a", 12, max_tokens=20), make_submit("b", 12, max_tokens=20))
    driver.run()
    assert driver.core.preemptions > 0
    positions = [(row.sequence, pick.position) for plan in driver.plans for row in plan.rows for pick in row.picks]
    assert len(positions) == len(set(positions)) == 40
    resumed = [row for plan in driver.plans[1:] for row in plan.rows if row.first == 0]
    assert resumed
    assert all(len(row.token_ids) > 12 for row in resumed)
    assert_at_rest(driver.core)


def test_a_recompute_is_helped_by_the_prefix_cache() -> None:
    """Blocks that were not evicted meanwhile are hit again."""
    driver = make_driver(blocks=9)
    driver.send(make_submit("a", 12, max_tokens=8), make_submit("b", 12, max_tokens=20))
    driver.run()
    assert driver.core.preemptions > 0
    returns = [row for plan in driver.plans[1:] for row in plan.rows if len(row.token_ids) > 1]
    assert returns
    assert any(row.first > 0 for row in returns)


def test_the_only_running_request_is_never_preempted() -> None:
    """A sequence that fills the whole pool runs to its end."""
    driver = make_driver(blocks=5)
    driver.send(make_submit("a", 5, max_tokens=100))
    driver.run()
    assert driver.core.preemptions == 0
    assert len(driver.ids("a")) == 16 - 5
    assert driver.finish("a") == "length"
    assert_at_rest(driver.core)


def test_admission_asks_for_the_whole_input_and_a_watermark_but_not_for_max_tokens() -> None:
    """Two legs of 3 blocks join in 8 blocks though their answers would need 16; a third one must wait."""
    driver = make_driver(blocks=9)
    for name in ("a", "b", "c"):
        driver.send(make_submit(name, 9, max_tokens=20))
    driver.step()
    assert rows_of(driver.plan) == [(0, 9), (0, 9)]
    assert driver.core.load().waiting == 1


def test_one_that_does_not_fit_is_not_overtaken() -> None:
    """A small leg behind a large one waits with it, so that none waits for ever."""
    driver = make_driver(blocks=9)
    driver.send(make_submit("a", 12, max_tokens=3), make_submit("big", 24), make_submit("small", 2))
    driver.step()
    assert rows_of(driver.plan) == [(0, 12)]
    driver.run()
    firsts = {row.sequence: index for index, plan in reversed(list(enumerate(driver.plans))) for row in plan.rows}
    assert firsts[2] <= firsts[3]


def test_a_sequence_too_long_for_the_engine_is_refused_with_both_lengths() -> None:
    """What can never fit is refused when it comes, not when it is scheduled."""
    driver = make_driver(blocks=5)
    (effect,) = driver.send(make_submit("a", 16))
    assert isinstance(effect, FailOut)
    assert effect.kind == "invalid"
    assert "16 tokens" in effect.message
    assert_at_rest(driver.core)


def test_a_context_that_no_pool_could_hold_is_a_configuration_error() -> None:
    """Every admitted sequence can run alone: the configuration says so, and all faults come together."""
    with pytest.raises(ValueError, match=r"max_model_len: 17 given, but 4 blocks of 4 tokens hold .* 16 tokens"):
        make_config(blocks=5, max_model_len=17)
    with pytest.raises(ValueError, match=r"token_budget: 0 given.*max_running: 0 given"):
        make_config(budget=0, max_running=0)
