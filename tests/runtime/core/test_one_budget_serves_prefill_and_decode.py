"""Chunked prefill beside decodes, from one token budget (B009)."""

from kvferry_runtime.core.messages import TokensOut
from tests.runtime.core.builders import assert_at_rest, make_driver, make_submit, rows_of


def test_a_partial_prefill_emits_and_counts_nothing() -> None:
    """B009: four decodes run on while a long prompt is computed in chunks, which pick nothing."""
    driver = make_driver(blocks=65, budget=16)
    for name in ("a", "b", "c", "d"):
        driver.send(make_submit(name, 2, max_tokens=30))
    driver.step()
    driver.send(make_submit("long", 75, max_tokens=5))
    chunks = []
    while not driver.ids("long"):
        effects = driver.step()
        row = driver.plan.rows[-1]
        chunks.append(len(row.token_ids))
        assert sum(len(r.token_ids) for r in driver.plan.rows) <= 16
        assert len([e for e in effects if isinstance(e, TokensOut)]) == 4 + len(row.picks)
    assert chunks == [12, 12, 12, 12, 12, 12, 3]
    driver.run()
    assert [len(driver.ids(name)) for name in ("a", "b", "c", "d", "long")] == [30, 30, 30, 30, 5]
    assert_at_rest(driver.core)


def test_a_prompt_longer_than_the_budget_takes_as_many_steps_as_it_needs() -> None:
    """Chunks join without gap or overlap, each with the blocks that it writes."""
    driver = make_driver(budget=5)
    driver.send(make_submit("a", 17, max_tokens=2))
    driver.run()
    assert [rows_of(plan) for plan in driver.plans] == [[(0, 5)], [(5, 5)], [(10, 5)], [(15, 2)], [(17, 1)]]
    assert [len(plan.rows[0].picks) for plan in driver.plans] == [0, 0, 0, 1, 1]
    assert all(len(plan.rows[0].table) * 4 >= plan.rows[0].first + 5 for plan in driver.plans[:3])


def test_waiting_requests_join_while_others_decode() -> None:
    """Continuous batching: a leg that comes later is in the next step."""
    driver = make_driver()
    driver.send(make_submit("a", 6, max_tokens=5))
    driver.step()
    driver.send(make_submit("b", 3, max_tokens=5))
    driver.step()
    assert rows_of(driver.plan) == [(6, 1), (0, 3)]


def test_no_more_sequences_run_than_the_batch_holds() -> None:
    """``max_running`` holds, and the next one starts when one ends."""
    driver = make_driver(max_running=2)
    for name in ("a", "b", "c"):
        driver.send(make_submit(name, 2, max_tokens=3))
    driver.run()
    assert max(len(plan.rows) for plan in driver.plans) == 2
    assert driver.ids("c") == [10_002, 10_003, 10_004]


def test_blocks_enter_the_cache_when_computed_and_not_before() -> None:
    """Between two chunks only the blocks that are full of computed tokens can be found."""
    driver = make_driver(budget=6)
    driver.send(make_submit("a", 16))
    assert driver.core.snapshot_hashes() == ()
    driver.step()
    assert len(driver.core.snapshot_hashes()) == 1
    driver.step()
    assert len(driver.core.snapshot_hashes()) == 3


def test_the_block_of_the_answer_is_cached_too() -> None:
    """The next turn of a conversation finds prompt and answer, as far as full blocks were computed."""
    driver = make_driver()
    driver.send(make_submit("a", list(range(100, 106)), max_tokens=8))
    driver.run()
    answer = driver.ids("a")
    driver.send(make_submit("b", [*range(100, 106), *answer, 55, 56], max_tokens=1))
    driver.step()
    assert driver.plan.rows[0].first == 12
