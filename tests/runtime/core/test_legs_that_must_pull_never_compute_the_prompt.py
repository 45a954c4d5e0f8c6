"""A leg that insists on ferried KV ends when it cannot be had, with the reason, and leaves nothing behind."""

import msgspec
import pytest

from kvferry_runtime.core.messages import (
    DropLease,
    EngineEffect,
    FailOut,
    HoldLease,
    LeaseEnded,
    PullFinished,
    TokensOut,
)
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.runtime.core.builders import assert_at_rest, make_driver, make_handle, make_submit


def of(effects: list[EngineEffect], *kinds: type) -> list[EngineEffect]:
    return [effect for effect in effects if isinstance(effect, kinds)]


def failed(effects: list[EngineEffect]) -> tuple[str, str]:
    """Kind and reason of the one failure; nothing was picked."""
    (fail,) = [effect for effect in effects if isinstance(effect, FailOut)]
    assert of(effects, TokensOut) == []
    assert fail.reason in fail.message
    return fail.kind, fail.reason


@pytest.mark.parametrize("n", [1, 3])
def test_a_pull_that_failed_ends_it(n: int) -> None:
    """No step is planned for it; its blocks are free, and its lease needs no word: the pull has said all."""
    driver = make_driver()
    submit = make_submit("r", 6, emitted=[[900]] * n, handle=make_handle(6), must_pull=True)
    driver.send(submit)
    driver.step()
    told = driver.send(PullFinished(key=submit.key, reason="lease_expired"))
    assert failed(told) == ("transfer", "lease_expired")
    assert of(told, DropLease) == []
    assert driver.run() == []
    assert driver.plans == []
    assert_at_rest(driver.core)


def test_a_handle_that_the_shell_refused_ends_it() -> None:
    """The shell takes the handle out and says why; the leg is not taken."""
    driver = make_driver()
    told = driver.send(make_submit("r", 6, emitted=[[900]], recompute="digest", must_pull=True))
    assert failed(told) == ("transfer", "digest")
    assert_at_rest(driver.core)


def test_a_handle_that_contradicts_the_leg_ends_it_and_is_given_up() -> None:
    """The lease's owner hears of it."""
    driver = make_driver()
    submit = make_submit("r", 6, emitted=[[900]], handle=make_handle(7), must_pull=True)
    told = driver.send(submit)
    assert failed(told) == ("transfer", "handle")
    assert [type(effect) for effect in told] == [HoldLease, DropLease, FailOut]
    assert_at_rest(driver.core)


def test_no_room_ends_it_where_another_would_compute() -> None:
    """Leases hold all room and nothing moves: the leg ends after the wait, and its lease is given up."""
    driver = make_driver(limits=msgspec.structs.replace(DEFAULT_LIMITS, lease_share=1.0, room_wait_s=5.0))
    driver.send(make_submit("leased", 4 * (driver.core.load().free_blocks - 2) - 1, kind="prefill"))
    driver.run()
    driver.send(make_submit("r", 10, emitted=[[900]], handle=make_handle(10), must_pull=True))
    assert driver.step() == []
    driver.now = 5.0
    told = driver.step()
    assert failed(told) == ("transfer", "no_room")
    assert [effect.reason for effect in told if isinstance(effect, DropLease)] == ["no_room"]
    driver.send(LeaseEnded(lease_id=1, why="released"))
    assert_at_rest(driver.core)


def test_valid_kv_is_its_own_from_then_on() -> None:
    """After a pull that held, preemption and recompute are no failures of the transfer."""
    driver = make_driver()
    submit = make_submit("r", 6, emitted=[[900]], handle=make_handle(6), must_pull=True)
    driver.send(submit)
    driver.step()
    driver.send(PullFinished(key=submit.key))
    driver.run()
    assert driver.ids("r") == [10_007, 10_008, 10_009]
    assert of(driver.effects, FailOut) == []
    assert_at_rest(driver.core)


def test_a_prompt_that_is_cached_here_needs_no_pull() -> None:
    """That is not a failure: the KV is here."""
    driver = make_driver()
    first = make_submit("r", 8)
    driver.send(first)
    driver.run()
    again = msgspec.structs.replace(
        make_submit("r", 8, attempt=1, emitted=[[900]], handle=make_handle(8), must_pull=True)
    )
    driver.send(again)
    driver.run()
    assert [effect.reason for effect in driver.effects if isinstance(effect, DropLease)] == ["cached"]
    assert of(driver.effects, FailOut) == []
    driver.send(LeaseEnded(lease_id=1, why="released"))
    assert_at_rest(driver.core)
