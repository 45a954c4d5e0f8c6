"""n choices: one prompt computed once, full blocks shared, the partial last one copied (B007)."""

from kvferry_runtime.core.messages import StopChoice, TokensOut
from kvferry_runtime.core.plan import BlockCopy
from tests.runtime.core.builders import EOS, Driver, assert_at_rest, make_driver, make_submit, rows_of


def distinct(driver: Driver) -> Driver:
    """Each choice gets ids of its own."""
    driver.token = lambda row, pick: 10_000 * (1 + pick.choice) + pick.position
    return driver


def expected(choice: int, first: int, count: int) -> list[int]:
    return [10_000 * (1 + choice) + first + index for index in range(count)]


def test_the_prompt_is_computed_once_and_gives_all_first_tokens() -> None:
    """One row for the prompt with one pick per choice, seeds counted up from the leg's own."""
    driver = distinct(make_driver())
    driver.send(make_submit("r", 6, n=3, max_tokens=4, seed=2**63 - 2, temperature=1.0))
    driver.step()
    (row,) = driver.plan.rows
    assert [(pick.choice, pick.position, pick.seed) for pick in row.picks] == [
        (0, 6, 2**63 - 2),
        (1, 6, 2**63 - 1),
        (2, 6, 0),
    ]
    driver.run()
    for choice in range(3):
        assert driver.ids("r", choice) == expected(choice, 6, 4)
        assert driver.finish("r", choice) == "length"
    assert_at_rest(driver.core)


def test_full_blocks_are_shared_and_the_partial_one_is_copied_per_choice() -> None:
    """Exact block ids: the copies are due before the step in which the choices go on."""
    driver = distinct(make_driver())
    driver.send(make_submit("r", 6, n=3))
    driver.step()
    assert driver.plan.rows[0].table == (1, 2)
    driver.step()
    assert driver.plan.copies == (BlockCopy(2, 3), BlockCopy(2, 4))
    assert [row.table for row in driver.plan.rows] == [(1, 2), (1, 3), (1, 4)]
    assert rows_of(driver.plan) == [(6, 1)] * 3
    driver.step()
    assert driver.plan.copies == ()


def test_a_prompt_of_whole_blocks_needs_no_copy() -> None:
    """At a block border each choice takes a new block of its own."""
    driver = distinct(make_driver())
    driver.send(make_submit("r", 8, n=2))
    driver.step()
    driver.step()
    assert driver.plan.copies == ()
    assert [row.table for row in driver.plan.rows] == [(1, 2, 3), (1, 2, 4)]


def test_the_source_of_a_copy_stays_until_the_copy_was_made() -> None:
    """The first choice ends with the step that forks: its block is still there for the others."""
    driver = distinct(make_driver())
    driver.send(make_submit("r", 6, n=3))
    driver.step()
    driver.send(StopChoice(key=make_submit("r").key, choice=0))
    driver.step()
    assert driver.plan.copies == (BlockCopy(2, 3), BlockCopy(2, 4))
    assert 2 not in {block for row in driver.plan.rows for block in row.table}
    driver.run()
    assert driver.ids("r", 1) == expected(1, 6, 4)
    assert_at_rest(driver.core)


def test_a_choice_that_ends_with_its_first_token_is_not_forked() -> None:
    """Two of three choices go on; the root becomes the first of them."""
    driver = make_driver()
    driver.token = lambda row, pick: EOS if pick.choice == 0 and pick.position == 6 else 10_000 + pick.position
    driver.send(make_submit("r", 6, n=3))
    driver.step()
    driver.step()
    assert len(driver.plan.rows) == 2
    assert driver.finish("r", 0) == "stop"
    driver.run()
    assert driver.ids("r", 2) == [10_006, 10_007, 10_008, 10_009]
    assert_at_rest(driver.core)


def test_a_fork_without_a_block_waits_and_recomputes() -> None:
    """The choice loses nothing but time: its first token was picked and becomes input."""
    driver = distinct(make_driver(blocks=4))
    driver.send(make_submit("r", 6, n=3, max_tokens=2))
    driver.run()
    for choice in range(3):
        assert driver.ids("r", choice) == expected(choice, 6, 2)
    assert any(row.token_ids[-1] in (20_006, 30_006) and len(row.token_ids) > 1 for p in driver.plans for row in p.rows)
    assert_at_rest(driver.core)


def test_choices_beyond_the_batch_wait_for_their_turn() -> None:
    """``max_running`` counts choices."""
    driver = distinct(make_driver(max_running=2))
    driver.send(make_submit("r", 6, n=4, max_tokens=3))
    driver.run()
    assert max(len(plan.rows) for plan in driver.plans) == 2
    for choice in range(4):
        assert driver.ids("r", choice) == expected(choice, 6, 3)


def test_preemption_among_choices_keeps_each_its_own_tokens() -> None:
    """B007: n=3 in a pool too small for three answers: every choice is whole, each position picked once."""
    driver = distinct(make_driver(blocks=8))
    driver.send(make_submit("r", 6, n=3, max_tokens=12, temperature=0.8, seed=1))
    driver.run()
    assert driver.core.preemptions > 0
    for choice in range(3):
        assert driver.ids("r", choice) == expected(choice, 6, 12)
    assert_at_rest(driver.core)


def test_a_preempted_fork_takes_its_pending_copy_with_it() -> None:
    """A block that was to be the target of a copy and has a new owner is not overwritten by that copy."""
    driver = distinct(make_driver(blocks=7, budget=6))
    driver.send(make_submit("other", 7, max_tokens=12), make_submit("r", 6, n=2, max_tokens=6))
    for _ in range(60):
        driver.step()
        owned = {block for row in driver.plan.rows for block in row.table}
        assert all(copy.target in owned for copy in driver.plan.copies)
    driver.run()
    assert driver.ids("r", 1) == expected(1, 6, 6)
    assert_at_rest(driver.core)


def test_choices_that_bring_emitted_ids_compute_them_and_pick_nothing_again() -> None:
    """A resumed leg: the prompt once, then each choice its own ids as input; a fresh choice gets its first pick."""
    driver = distinct(make_driver())
    driver.send(make_submit("r", 6, emitted=[[70, 71], [], [72]], max_tokens=4))
    driver.step()
    (row,) = driver.plan.rows
    assert [(pick.choice, pick.position) for pick in row.picks] == [(1, 6)]
    driver.step()
    assert [(row.first, row.token_ids) for row in driver.plan.rows] == [(6, (70, 71)), (6, (20_006,)), (6, (72,))]
    driver.run()
    assert driver.ids("r", 0) == expected(0, 8, 2)
    assert driver.ids("r", 1) == expected(1, 6, 4)
    assert driver.ids("r", 2) == expected(2, 7, 3)
    assert_at_rest(driver.core)


def test_one_choice_with_emitted_ids_needs_no_root() -> None:
    """n=1: prompt and emitted ids are one input."""
    driver = make_driver()
    driver.send(make_submit("r", 6, emitted=[[70, 71]], max_tokens=3))
    driver.run()
    assert rows_of(driver.plans[0]) == [(0, 8)]
    assert driver.ids("r") == [10_008]
    assert driver.finish("r") == "length"


def test_a_stopped_choice_says_nothing_more_and_the_last_one_ends_the_leg() -> None:
    """``StopChoice`` is silent, idempotent, and frees the choice's blocks."""
    driver = distinct(make_driver())
    submit = make_submit("r", 6, n=2, max_tokens=20)
    driver.send(submit)
    driver.step()
    driver.step()
    assert driver.send(StopChoice(key=submit.key, choice=1), StopChoice(key=submit.key, choice=1)) == []
    effects = driver.step()
    assert [(e.choice, e.finish) for e in effects if isinstance(e, TokensOut)] == [(0, None)]
    assert driver.send(StopChoice(key=submit.key, choice=0), StopChoice(key=submit.key, choice=9)) == []
    assert_at_rest(driver.core)


def test_a_choice_stopped_before_the_prompt_is_computed_is_never_picked() -> None:
    """The root goes on for the other choices alone."""
    driver = distinct(make_driver(budget=4))
    submit = make_submit("r", 6, n=2)
    driver.send(submit)
    driver.step()
    driver.send(StopChoice(key=submit.key, choice=0))
    driver.run()
    assert driver.ids("r", 0) == []
    assert driver.ids("r", 1) == expected(1, 6, 4)
    assert_at_rest(driver.core)
