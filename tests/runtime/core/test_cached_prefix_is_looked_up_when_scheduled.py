"""Prefix hits: looked up when a leg is scheduled, never the last token, counted once (B018)."""

from kvferry_runtime.core.messages import TokensOut
from tests.runtime.core.builders import assert_at_rest, make_driver, make_submit, rows_of

PROMPT = list(range(500, 513))


def cached_told(driver: object, name: str) -> list[int]:
    effects = driver.effects
    return [e.cached_tokens for e in effects if isinstance(e, TokensOut) and e.key.internal_id == name]


def test_blocks_evicted_while_a_leg_waited_are_computed_again() -> None:
    """B018: the hit of a queued leg is not kept; what was evicted meanwhile is no hit."""
    driver = make_driver(blocks=9, max_running=1)
    driver.send(make_submit("warm", PROMPT, max_tokens=1))
    driver.run()
    driver.send(make_submit("hog", 30, max_tokens=2), make_submit("late", PROMPT, max_tokens=2))
    driver.run()
    assert cached_told(driver, "late") == [0, 0]
    assert_at_rest(driver.core)


def test_a_hit_never_covers_the_last_token() -> None:
    """A prompt of whole blocks that is cached entirely still computes its last block."""
    driver = make_driver()
    for name in ("a", "b"):
        driver.send(make_submit(name, PROMPT[:12], max_tokens=1))
        driver.run()
    assert [rows_of(plan) for plan in driver.plans] == [[(0, 12)], [(8, 4)]]
    assert cached_told(driver, "b") == [8]


def test_running_legs_share_the_blocks_of_a_common_prefix() -> None:
    """The second leg's table begins with the first one's blocks, referenced and not copied."""
    driver = make_driver()
    driver.send(make_submit("a", PROMPT, max_tokens=9))
    driver.step()
    driver.send(make_submit("b", [*PROMPT, 7, 8], max_tokens=9))
    driver.step()
    first, second = driver.plan.rows
    assert first.table[:3] == second.table[:3]
    assert first.table[3] != second.table[3]
    driver.run()
    assert_at_rest(driver.core)


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """A preemption's own hits are not told as cached prompt tokens."""
    driver = make_driver(blocks=9)
    driver.send(make_submit("a", 12, max_tokens=20), make_submit("b", 12, max_tokens=20))
    driver.run()
    assert driver.core.preemptions > 0
    assert set(cached_told(driver, "a") + cached_told(driver, "b")) == {0}


def test_without_prefix_caching_nothing_is_found_or_told() -> None:
    """The switch turns off hits, publication and events."""
    driver = make_driver(prefix_caching=False)
    for name in ("a", "b"):
        driver.send(make_submit(name, PROMPT, max_tokens=1))
        driver.run()
    assert [plan.rows[0].first for plan in driver.plans] == [0, 0]
    assert driver.core.drain_kv_events() == []
    assert_at_rest(driver.core)
