"""A leg can end at any stage, and then holds nothing."""

import pytest

from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.integrity import IntegrityError, check_block_accounts
from kvferry_runtime.core.messages import AbortLeg, FailOut
from tests.runtime.core.builders import assert_at_rest, make_config, make_driver, make_submit


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["generate", "prefill"])
def test_an_abort_after_any_step_frees_all_and_says_nothing(steps: int, n: int, kind: str) -> None:
    """Waiting, in the middle of a prompt, forked, decoding: nothing more comes out and nothing is held."""
    driver = make_driver(budget=4)
    submit = make_submit("r", 10, n=n, kind=kind, max_tokens=20)
    driver.send(submit)
    for _ in range(steps):
        driver.step()
    ended = not driver.core.load().running and steps > 0
    assert driver.send(AbortLeg(key=submit.key)) == []
    assert driver.run() == []
    if not ended:
        assert_at_rest(driver.core)


@pytest.mark.parametrize("steps", range(6))
def test_a_deadline_fails_the_leg_once_and_frees_all(steps: int) -> None:
    """At its deadline, not before; other legs go on."""
    driver = make_driver(budget=4)
    driver.send(make_submit("r", 10, n=2, max_tokens=30, deadline=5.0), make_submit("s", 3, max_tokens=30))
    for _ in range(steps):
        driver.step()
    driver.now = 4.99
    assert not [e for e in driver.step() if isinstance(e, FailOut)]
    driver.now = 5.0
    failed = [e for e in driver.run() if isinstance(e, FailOut)]
    assert [(e.key.internal_id, e.kind) for e in failed] == [("r", "deadline")]
    assert len(driver.ids("s")) == 30
    assert_at_rest(driver.core)


def test_the_next_deadline_is_known() -> None:
    """A shell can sleep until then."""
    driver = make_driver()
    assert driver.core.next_deadline == float("inf")
    driver.send(make_submit("a", deadline=9.0), make_submit("b", deadline=4.0))
    assert driver.core.next_deadline == 4.0
    driver.now = 4.0
    driver.core.expire(driver.now)
    assert driver.core.next_deadline == 9.0


def test_the_load_tells_what_waits_and_what_is_free() -> None:
    """Sequences running, legs waiting, their uncomputed input, blocks and leases."""
    driver = make_driver(max_running=2)
    driver.send(make_submit("a", 10), make_submit("b", 5, kind="prefill"), make_submit("c", 7), make_submit("d", 8))
    load = driver.core.load()
    assert (load.running, load.waiting, load.queued_tokens, load.free_blocks) == (0, 4, 30, 16)
    driver.step()
    load = driver.core.load()
    assert (load.running, load.waiting, load.queued_tokens, load.free_blocks) == (1, 2, 15, 16 - 3 - 2)
    assert (load.leases, load.total_blocks, load.draining) == (1, 16, False)
    assert driver.core.has_work()
    assert not driver.core.idle()


def test_a_broken_account_prints_every_term() -> None:
    """The error of an integrity check names sums, blocks and owners."""
    with pytest.raises(IntegrityError) as caught:
        check_block_accounts(
            total=4, free=[1, 1], idle_cached=[2], refs={2: 1, 3: 2}, owners={"sequences": [3], "leases": []}
        )
    text = str(caught.value)
    assert "total=4 free=2 cached=1 used=2 references=3 (sequences=1, leases=0)" in text
    assert "blocks in no place [4], in two places [1, 2]" in text
    assert "block 3 has 2 references, owners hold {'sequences': 1}" in text


def test_a_block_that_leaks_is_found() -> None:
    """A planted fault: a reference that nobody owns, and a table that lost a block."""
    core = EngineCore(make_config())
    core._kv.pool.allocate(1)
    with pytest.raises(IntegrityError, match="block 1 has 1 references"):
        core.check_integrity()
    driver = make_driver()
    driver.check = False
    driver.send(make_submit("r", 10))
    driver.step()
    driver.core._scheduler.running[0].table.pop()
    with pytest.raises(IntegrityError, match="block 3 has 1 references"):
        driver.core.check_integrity()
