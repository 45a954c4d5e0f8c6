"""Legs with a handle: hold, pull, wait, fall back; one transfer at most (B006, B025)."""

import msgspec
import pytest

from kvferry_runtime.core.messages import (
    AbortLeg,
    DropLease,
    EngineEffect,
    FailOut,
    HoldLease,
    LeaseEnded,
    PullFinished,
    StartPull,
    StopChoice,
    Submit,
    TokensOut,
)
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.runtime.core.builders import Driver, assert_at_rest, make_driver, make_handle, make_submit, rows_of


def make_ferried(name: str = "r", prompt: int = 6, **fields: object) -> Submit:
    """A leg that brings its first token and a handle to the prompt's KV."""
    values: dict[str, object] = {"emitted": [[900]], "handle": make_handle(prompt), **fields}
    return make_submit(name, prompt, **values)


def of(effects: list[EngineEffect], *kinds: type) -> list[EngineEffect]:
    return [effect for effect in effects if isinstance(effect, kinds)]


def start(driver: Driver, *submits: Submit) -> list[StartPull]:
    driver.send(*submits)
    return [effect for effect in driver.step() if isinstance(effect, StartPull)]


def done(submit: Submit, reason: str = "") -> PullFinished:
    return PullFinished(key=submit.key, reason=reason)


def lease_all(driver: Driver, *, but: int) -> None:
    """Leases on all blocks but a few, whose readers are elsewhere."""
    tokens = (driver.core.load().free_blocks - but) * 4 - 1
    driver.send(make_submit("leased", tokens, kind="prefill"))
    driver.run()
    assert driver.core.load().free_blocks == but


def fill(driver: Driver, *, but: int) -> None:
    """A running leg takes all blocks but a few, and keeps them."""
    tokens = (driver.core.load().free_blocks - but) * 4 - 3
    driver.send(make_submit("filler", tokens, max_tokens=3))
    driver.step()
    assert driver.core.load().free_blocks == but


def test_a_pulled_prompt_is_not_computed_again() -> None:
    """Hold at once, pull when there is room, then go on from the first token."""
    driver = make_driver()
    submit = make_ferried()
    assert driver.send(submit) == [HoldLease(key=submit.key, handle=submit.handle, deadline_s=600.0)]
    driver.now = 10.0
    (pull,) = driver.step()
    assert isinstance(pull, StartPull)
    assert (pull.key, pull.blocks, pull.deadline_s) == (submit.key, ((1, 2),), 590.0)
    assert driver.step() == []
    assert driver.core.load().waiting == 1
    assert driver.send(done(submit)) == []
    driver.run()
    assert rows_of(driver.plans[0]) == [(6, 1)]
    assert driver.plans[0].rows[0].token_ids == (900,)
    assert driver.ids("r") == [10_007, 10_008, 10_009]
    assert not of(driver.effects, DropLease)
    told = of(driver.effects, TokensOut)
    assert {(out.cached_tokens, out.recomputed) for out in told if isinstance(out, TokensOut)} == {(0, "")}
    assert_at_rest(driver.core)


def test_pulled_kv_waits_with_its_count_when_no_block_is_free() -> None:
    """B006: no free block for the next token; the leg waits, no second transfer, then goes on where it was."""
    driver = make_driver(blocks=9)
    submit = make_ferried(prompt=8)
    start(driver, submit)
    fill(driver, but=0)
    driver.send(done(submit))
    driver.step()
    assert rows_of(driver.plan)[0][1] == 1
    assert len(driver.plan.rows) == 1
    load = driver.core.load()
    assert (load.running, load.waiting, load.queued_tokens) == (1, 1, 1)
    driver.run()
    assert len(of(driver.effects, StartPull)) == 1
    assert driver.ids("r") == [10_009, 10_010, 10_011]
    assert all(row.first >= 8 for plan in driver.plans for row in plan.rows if row.sequence == 1)
    assert_at_rest(driver.core)


def test_blocks_that_wait_are_taken_back_only_from_the_last_and_only_for_one_that_runs_alone() -> None:
    """Ferried blocks never starve the engine: a lone sequence that needs a block takes them."""
    driver = make_driver(blocks=9, max_running=1)
    first, second = make_ferried("x", prompt=8), make_ferried("y", prompt=8)
    driver.send(make_submit("alone", 15, max_tokens=12))
    driver.step()
    start(driver, first)
    driver.send(done(first))
    assert driver.core.load().free_blocks == 2
    start(driver, msgspec.structs.replace(second, handle=make_handle(8)))
    driver.run()
    assert driver.core.preemptions >= 1
    assert len(driver.ids("alone")) == 12
    assert driver.ids("x") == [10_009, 10_010, 10_011]
    driver.send(done(second))
    driver.run()
    assert driver.ids("y") == [10_009, 10_010, 10_011]
    assert_at_rest(driver.core)


@pytest.mark.parametrize("reason", ["lease_expired", "peer_dead"])
def test_a_failed_pull_is_computed_here_and_told_once(reason: str) -> None:
    """The prompt is recomputed, the first token stays as it was picked, and the first output says why."""
    driver = make_driver()
    submit = make_ferried()
    start(driver, submit)
    driver.send(done(submit, reason))
    driver.run()
    assert rows_of(driver.plans[0]) == [(0, 7)]
    outs = [out for out in driver.effects if isinstance(out, TokensOut)]
    assert [out.recomputed for out in outs] == [reason, "", ""]
    assert driver.ids("r") == [10_007, 10_008, 10_009]
    assert not of(driver.effects, DropLease)
    assert_at_rest(driver.core)


def test_a_handle_dropped_by_the_shell_is_told_too() -> None:
    """``Submit.recompute`` is the reason of the first output."""
    driver = make_driver()
    driver.send(make_submit("r", 6, emitted=[[900]], recompute="digest"))
    driver.run()
    assert [out.recomputed for out in driver.effects if isinstance(out, TokensOut)] == ["digest", "", ""]


@pytest.mark.parametrize(
    "wrong", [{"token_count": 0}, {"token_count": 7}, {"block_count": 3}, {"block_count": 1}, {"block_count": 10**9}]
)
def test_a_handle_that_contradicts_the_leg_is_dropped_and_computed(wrong: dict[str, int]) -> None:
    """Counts that do not fit the prompt: hold, drop, recompute; never a pull (B073)."""
    driver = make_driver()
    submit = make_ferried(handle=make_handle(6, **wrong))
    hold, drop = driver.send(submit)
    assert isinstance(hold, HoldLease)
    assert drop == DropLease(key=submit.key, reason="handle")
    driver.run()
    assert not of(driver.effects, StartPull)
    assert next(out.recomputed for out in driver.effects if isinstance(out, TokensOut)) == "handle"
    assert_at_rest(driver.core)


def test_a_prompt_that_is_cached_here_is_not_pulled() -> None:
    """B025: 50 legs whose prompt is in the local cache drop their lease each, and nothing stays held."""
    driver = make_driver()
    prompt = list(range(700, 711))
    driver.send(make_submit("warm", prompt, max_tokens=1))
    driver.run()
    for number in range(50):
        submit = make_submit(f"r{number}", prompt, emitted=[[900]], handle=make_handle(11))
        effects = driver.send(submit) + driver.run()
        assert DropLease(key=submit.key, reason="cached") in effects
        assert not of(effects, StartPull)
        assert {out.cached_tokens for out in effects if isinstance(out, TokensOut)} == {8}
    assert_at_rest(driver.core)


def test_a_prompt_of_which_more_than_a_block_is_missing_is_pulled() -> None:
    """Half a prompt in the cache is no reason to compute the other half."""
    driver = make_driver()
    prompt = list(range(700, 714))
    driver.send(make_submit("warm", prompt[:9], max_tokens=1))
    driver.run()
    assert start(driver, make_submit("r", prompt, emitted=[[900]], handle=make_handle(14)))


def test_pulled_blocks_are_published_once_valid_and_not_before() -> None:
    """Only full blocks, and only when the transfer has ended well."""
    driver = make_driver()
    submit = make_ferried(prompt=10)
    start(driver, submit)
    assert driver.core.snapshot_hashes() == ()
    driver.send(done(submit))
    assert len(driver.core.snapshot_hashes()) == 2
    failed = make_ferried("f", prompt=10)
    driver.run()
    start(driver, failed)
    before = driver.core.snapshot_hashes()
    driver.send(done(failed, "read_error"))
    assert driver.core.snapshot_hashes() == before


def test_transfers_in_flight_are_capped_and_do_not_block_local_legs() -> None:
    """The third handle waits for a slot, in order; a local leg that came later runs meanwhile."""
    limits = msgspec.structs.replace(DEFAULT_LIMITS, transfers=2)
    driver = make_driver(limits=limits)
    submits = [make_ferried(f"r{number}") for number in range(4)]
    driver.send(*submits, make_submit("local", 6, max_tokens=1))
    effects = driver.step()
    assert [pull.key for pull in of(effects, StartPull)] == [submits[0].key, submits[1].key]
    assert driver.ids("local") == [10_006]
    driver.send(done(submits[1]))
    assert [pull.key for pull in of(driver.step(), StartPull)] == [submits[2].key]
    for index in (0, 2):
        driver.send(done(submits[index]))
    driver.step()
    driver.send(done(submits[3]))
    driver.run()
    assert all(len(driver.ids(f"r{number}")) == 3 for number in range(4))
    assert_at_rest(driver.core)


def test_a_leg_that_waits_for_room_to_pull_is_not_overtaken_for_ever() -> None:
    """Memory goes by arrival: a local leg that came later does not take the blocks that free up."""
    driver = make_driver(blocks=9)
    fill(driver, but=1)
    assert not start(driver, make_ferried(prompt=12), make_submit("later", 2, max_tokens=1))
    assert driver.ids("later") == []
    driver.run()
    assert len(of(driver.effects, StartPull)) == 1
    assert driver.ids("later") == [10_002]


@pytest.mark.parametrize("how", ["abort", "deadline", "stop"])
@pytest.mark.parametrize("reason", ["", "cancelled"])
def test_a_leg_that_ends_during_its_pull_leaves_the_blocks_to_the_transfer(how: str, reason: str) -> None:
    """The lease is dropped, the blocks stay quarantined until the transfer says that it writes no more."""
    driver = make_driver()
    submit = make_ferried(deadline=5.0)
    start(driver, submit)
    if how == "abort":
        effects = driver.send(AbortLeg(key=submit.key))
    elif how == "stop":
        effects = driver.send(StopChoice(key=submit.key, choice=0))
    else:
        driver.now = 5.0
        effects = driver.step()
    label = {"abort": "cancelled", "deadline": "deadline", "stop": "ended"}[how]
    assert of(effects, DropLease) == [DropLease(key=submit.key, reason=label)]
    assert [e.kind for e in effects if isinstance(e, FailOut)] == (["deadline"] if how == "deadline" else [])
    assert driver.core.load().free_blocks == 14
    assert not driver.core.idle()
    driver.send(make_submit("other", 50, max_tokens=2))
    driver.run()
    assert not {1, 2} & {block for plan in driver.plans for row in plan.rows for block in row.table}
    driver.send(done(submit, reason), done(submit, reason))
    assert_at_rest(driver.core)


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_leg_that_ends_before_its_pull_drops_its_lease(how: str) -> None:
    """Hold is followed by exactly one of pull and drop."""
    driver = make_driver(blocks=9)
    fill(driver, but=1)
    submit = make_ferried(prompt=12, deadline=5.0)
    driver.send(submit)
    driver.step()
    if how == "abort":
        effects = driver.send(AbortLeg(key=submit.key))
    else:
        driver.now = 5.0
        effects = driver.step()
    assert len(of(effects, DropLease)) == 1
    driver.run()
    assert_at_rest(driver.core)


def test_an_aborted_leg_with_pulled_kv_frees_it() -> None:
    """After the pull the lease is settled: no drop, only free blocks."""
    driver = make_driver(blocks=9)
    submit = make_ferried(prompt=8)
    start(driver, submit)
    fill(driver, but=0)
    driver.send(done(submit))
    assert driver.send(AbortLeg(key=submit.key)) == []
    driver.run()
    assert_at_rest(driver.core)


def test_choices_fork_off_the_pulled_prompt() -> None:
    """Three choices share one handle: one pull, shared full blocks, a copy of the partial one each."""
    driver = make_driver()
    driver.token = lambda row, pick: 10_000 * (1 + pick.choice) + pick.position
    submit = make_ferried(emitted=[[900], [901], [902]])
    start(driver, submit)
    driver.send(done(submit))
    driver.run()
    assert [(row.first, row.token_ids) for row in driver.plans[0].rows] == [(6, (900,)), (6, (901,)), (6, (902,))]
    assert [row.table for row in driver.plans[0].rows] == [(1, 2), (1, 3), (1, 4)]
    assert [(copy.source, copy.target) for copy in driver.plans[0].copies] == [(2, 3), (2, 4)]
    for choice in range(3):
        first = 10_000 * (1 + choice)
        assert driver.ids("r", choice) == [first + 7, first + 8, first + 9]
    assert_at_rest(driver.core)


def test_a_choice_without_a_first_token_recomputes_only_the_last_position() -> None:
    """The logits of the prompt's end are needed once more; all else is in the ferried blocks."""
    driver = make_driver()
    submit = make_ferried(emitted=[[900], []])
    start(driver, submit)
    driver.send(done(submit))
    driver.run()
    assert rows_of(driver.plans[0]) == [(5, 1)]
    assert [(pick.choice, pick.position) for pick in driver.plans[0].rows[0].picks] == [(1, 6)]
    assert len(driver.ids("r", 1)) == 4
    assert_at_rest(driver.core)


def test_a_failed_pull_of_several_choices_computes_the_prompt_once() -> None:
    """The same root computes it here; no first token is picked again."""
    driver = make_driver()
    submit = make_ferried(emitted=[[900], [901]])
    start(driver, submit)
    driver.send(done(submit, "lease_expired"))
    driver.run()
    assert rows_of(driver.plans[0]) == [(0, 6)]
    assert driver.plans[0].rows[0].picks == ()
    assert rows_of(driver.plans[1]) == [(6, 1), (6, 1)]
    assert [out.recomputed for out in driver.effects if isinstance(out, TokensOut)].count("lease_expired") == 1
    assert_at_rest(driver.core)


def test_a_leg_that_is_over_already_drops_its_lease_at_once() -> None:
    """Its owner hears of it; the answer is a finish without ids."""
    driver = make_driver()
    submit = make_ferried(emitted=[[900]], max_tokens=1)
    hold, told, drop = driver.send(submit)
    assert isinstance(hold, HoldLease)
    assert told == TokensOut(key=submit.key, choice=0, ids=(), finish="length")
    assert drop == DropLease(key=submit.key, reason="ended")
    assert_at_rest(driver.core)


def test_the_end_of_an_unknown_pull_is_ignored() -> None:
    """Late, repeated and foreign messages change nothing."""
    driver = make_driver()
    submit = make_ferried()
    assert driver.send(done(submit), done(submit, "peer_dead")) == []
    start(driver, submit)
    driver.send(done(submit), done(submit, "peer_dead"))
    driver.run()
    assert {out.recomputed for out in driver.effects if isinstance(out, TokensOut)} == {""}


def test_a_key_is_taken_while_a_transfer_of_it_still_writes() -> None:
    """A second leg of the same name would mistake the first one's end for its own."""
    driver = make_driver()
    submit = make_ferried(deadline=5.0)
    start(driver, submit)
    driver.now = 6.0
    driver.step()
    (refused,) = driver.send(submit)
    assert isinstance(refused, FailOut)
    assert refused.kind == "invalid"
    driver.send(done(submit, "cancelled"))
    assert of(driver.send(submit), HoldLease)


def test_a_leg_that_only_leases_keep_from_its_blocks_gives_its_own_lease_up() -> None:
    """Two engines that lease to each other and have no room left do not wait for each other until a deadline."""
    limits = msgspec.structs.replace(DEFAULT_LIMITS, lease_share=1.0, room_wait_s=5.0)
    driver = make_driver(limits=limits)
    lease_all(driver, but=2)
    submit = make_ferried("r", 10)
    driver.send(submit)
    assert driver.step() == []
    driver.now = 4.99
    assert driver.step() == []
    driver.now = 5.0
    assert driver.step() == [DropLease(key=submit.key, reason="no_room")]
    assert driver.step() == []
    driver.send(LeaseEnded(lease_id=1, why="released"))
    outputs = of(driver.run(), TokensOut)
    assert [ids for output in outputs for ids in output.ids] == [10_011, 10_012, 10_013]
    assert outputs[0].recomputed == "no_room"
    assert_at_rest(driver.core)


def test_a_leg_waits_for_blocks_as_long_as_something_moves() -> None:
    """Steps of others, however long they take, are no reason to give KV up that is there already."""
    driver = make_driver(limits=msgspec.structs.replace(DEFAULT_LIMITS, room_wait_s=5.0))
    fill(driver, but=1)
    submit = make_ferried("r", 10)
    driver.send(submit)
    driver.now = 100.0
    driver.step()
    driver.now = 200.0
    assert of(driver.run(), StartPull, DropLease) != []
    assert not of(driver.effects, DropLease)
