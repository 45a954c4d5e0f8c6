"""Blocks that a transfer may still write into are nobody's: a leg that needs them waits, however late the writer is."""

import pytest

from kvferry_runtime.core.messages import AbortLeg, PullFinished, StartPull, Submit
from tests.runtime.core.builders import Driver, assert_at_rest, make_driver, make_handle, make_submit

LATE_S = 6.0


def begin_pull(driver: Driver) -> tuple[Submit, tuple[int, ...]]:
    """A leg whose KV is on its way: five blocks."""
    submit = make_submit("pulls", 18, emitted=[[900]], handle=make_handle(18))
    driver.send(submit)
    (pull,) = [effect for effect in driver.step() if isinstance(effect, StartPull)]
    return submit, pull.blocks[0]


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_victim_gets_no_block_of_a_writer_that_is_late(how: str) -> None:
    """The leg is gone and its client told; six seconds later its blocks still have their one writer."""
    driver = make_driver(blocks=16)
    submit, blocks = begin_pull(driver)
    if how == "abort":
        driver.send(AbortLeg(key=submit.key))
    else:
        driver.now += 1000.0
        driver.step()
    assert driver.core._kv.pool.quarantined_ids() == frozenset(blocks)
    free = driver.core.load().free_blocks
    victim = make_submit("victim", (free + 2) * 4 - 3, max_tokens=2)
    driver.send(victim)
    for _ in range(60):  # it waits, and computes nothing
        driver.now += LATE_S / 60
        driver.step()
        assert driver.ids("victim") == []
        assert driver.core._kv.pool.quarantined_ids() == frozenset(blocks)
        driver.core.check_integrity()
    driver.send(PullFinished(key=submit.key, reason="cancelled"))
    driver.run()
    assert len(driver.ids("victim")) == 2
    assert driver.finish("victim") == "length"
    assert_at_rest(driver.core)


def test_others_that_fit_elsewhere_go_on_meanwhile() -> None:
    """Only who needs those blocks waits."""
    driver = make_driver(blocks=16)
    submit, blocks = begin_pull(driver)
    driver.send(AbortLeg(key=submit.key))
    driver.send(make_submit("small", 6, max_tokens=3))
    driver.run()
    assert len(driver.ids("small")) == 3
    assert driver.core._kv.pool.quarantined_ids() == frozenset(blocks)
    driver.send(PullFinished(key=submit.key, reason="cancelled"))
    assert_at_rest(driver.core)
