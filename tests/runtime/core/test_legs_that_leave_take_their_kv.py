"""A leg that is handed over ends with a lease on what was computed for it, or is given back; nothing comes after it."""

import msgspec
import pytest

from kvferry_runtime.core.messages import (
    AbortLeg,
    Drain,
    DropLease,
    EngineEffect,
    FailOut,
    GrantLease,
    HandedOver,
    HandOver,
    LeaseEnded,
    LegKey,
    PullFinished,
    TokensOut,
)
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.hashing import prompt_digest
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.runtime.core.builders import Driver, assert_at_rest, make_driver, make_handle, make_submit, own_ids


def leave(driver: Driver, name: str = "r") -> list[EngineEffect]:
    return driver.send(HandOver(key=LegKey(name, 0)))


def grant_of(effects: list[EngineEffect]) -> GrantLease:
    """The one lease, granted before the leg is told to have left, and nothing else."""
    grant, told = effects
    assert isinstance(grant, GrantLease)
    assert isinstance(told, HandedOver)
    assert grant.key == told.key
    return grant


def release(driver: Driver, grant: GrantLease) -> None:
    driver.send(LeaseEnded(lease_id=grant.lease_id, why="released"))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_a_running_leg_leaves_all_but_its_last_token(tokens: int) -> None:
    """The last emitted id has no KV: neither the count, nor the digest, nor the blocks include it."""
    driver = make_driver()
    driver.send(make_submit("r", 6, max_tokens=20))
    for _ in range(tokens):
        driver.step()
    emitted = driver.ids("r")
    assert len(emitted) == tokens
    table = driver.plan.rows[0].table
    grant = grant_of(leave(driver))
    ids = [*own_ids("r", 6), *emitted[:-1]]
    assert grant.token_count == len(ids)
    assert grant.prompt_digest == prompt_digest(b"k" * 32, ids, KeyExtras(tenant_salt=b""))
    assert grant.blocks == (table[: -(-len(ids) // 4)],)
    assert driver.run() == []
    load = driver.core.load()
    assert (load.running, load.leases, load.total_blocks - load.free_blocks) == (0, 1, len(grant.blocks[0]))
    release(driver, grant)
    assert_at_rest(driver.core)


def test_leases_of_legs_that_left_take_nothing_from_prefills_share() -> None:
    """Their blocks were in use already: any number of legs can leave, and prefill's own leases keep their bound."""
    driver = make_driver(limits=msgspec.structs.replace(DEFAULT_LIMITS, lease_share=0.25))
    for name in "abcd":
        driver.send(make_submit(name, 8, max_tokens=20))
    driver.step()
    grants = [grant_of(leave(driver, name)) for name in "abcd"]
    assert driver.core.load().leases == 4
    driver.send(make_submit("p", 8, kind="prefill"))
    driver.step()
    assert driver.core.load().leases == 5
    for grant in grants:
        release(driver, grant)
    driver.send(LeaseEnded(lease_id=5, why="expired"))
    assert_at_rest(driver.core)


def test_a_leg_without_kv_is_given_back() -> None:
    """It waits for its turn: another engine computes it, and nothing is kept here."""
    driver = make_driver(max_running=1)
    driver.send(make_submit("a", 6), make_submit("b", 6))
    driver.step()
    (fail,) = leave(driver, "b")
    assert isinstance(fail, FailOut)
    assert (fail.kind, fail.key) == ("draining", LegKey("b", 0))
    driver.run()
    assert driver.finish("a") == "length"
    assert_at_rest(driver.core)


def test_half_a_prompt_is_worth_its_way() -> None:
    """Nothing was picked yet; what was computed of the prompt goes along."""
    driver = make_driver(budget=5)
    driver.send(make_submit("r", 12))
    driver.step()
    grant = grant_of(leave(driver))
    assert (grant.token_count, len(grant.blocks[0])) == (5, 2)
    release(driver, grant)
    assert_at_rest(driver.core)


@pytest.mark.parametrize("stage", ["held", "pulling"])
@pytest.mark.parametrize("reason", ["", "peer_dead"])
def test_kv_under_way_arrives_first(stage: str, reason: str) -> None:
    """The lease of its prompt is not given up in the middle: it leaves when the pull has ended, however."""
    driver = make_driver()
    submit = make_submit("r", 6, emitted=[[900]], handle=make_handle(6))
    driver.send(submit)
    if stage == "pulling":
        driver.step()
    assert leave(driver) == []
    if stage == "held":
        driver.step()
    driver.send(PullFinished(key=submit.key, reason=reason))
    effects = driver.step()
    assert not [effect for effect in effects if isinstance(effect, (TokensOut, DropLease))]
    if reason:
        (fail,) = effects
        assert isinstance(fail, FailOut)
        assert fail.kind == "draining"
    else:
        grant = grant_of(effects)
        assert grant.token_count == 6
        release(driver, grant)
    assert_at_rest(driver.core)


def test_a_leg_that_must_pull_is_never_given_back_without_kv() -> None:
    """Its prompt's lease is spent: preempted, it computes here, as it may, and leaves once it has something."""
    driver = make_driver(blocks=7, prefix_caching=False, max_model_len=24)
    driver.send(make_submit("first", 8, max_tokens=10))
    driver.step()
    submit = make_submit("r", 7, emitted=[[900]], handle=make_handle(7), must_pull=True, max_tokens=17)
    driver.send(submit)
    driver.step()
    driver.send(PullFinished(key=submit.key))
    while not driver.core.preemptions:
        driver.step()
    assert leave(driver) == []
    effects: list[EngineEffect] = []
    while not any(isinstance(effect, HandedOver) for effect in effects):
        effects = driver.step()
    assert not any(isinstance(effect, FailOut) for effect in driver.effects)
    (grant,) = [effect for effect in effects if isinstance(effect, GrantLease)]
    assert grant.token_count == 7 + len(driver.ids("r"))
    driver.run()
    assert driver.finish("first") == "length"
    release(driver, grant)
    assert_at_rest(driver.core)


@pytest.mark.parametrize("prompt", [3, 4, 6, 8])
def test_several_choices_leave_the_whole_blocks_that_they_share(prompt: int) -> None:
    """The block in which the prompt ends is each choice's own by now. Without a whole block nothing goes along."""
    driver = make_driver()
    driver.send(make_submit("r", prompt, n=3, max_tokens=20))
    for _ in range(4):
        driver.step()
    effects = leave(driver)
    if prompt < 4:
        assert isinstance(effects[0], FailOut)
    else:
        grant = grant_of(effects)
        assert (grant.token_count, len(grant.blocks[0])) == (prompt // 4 * 4, prompt // 4)
        assert grant.prompt_digest == prompt_digest(
            b"k" * 32, own_ids("r", prompt)[: grant.token_count], KeyExtras(tenant_salt=b"")
        )
        release(driver, grant)
    assert driver.run() == []
    assert_at_rest(driver.core)


def test_asking_twice_hands_over_once() -> None:
    """Neither a second request, nor one for a leg that is unknown, aborted or prefill's, does anything."""
    driver = make_driver()
    driver.send(make_submit("r", 6, max_tokens=20), make_submit("p", 6, kind="prefill"), make_submit("x", 6))
    driver.step()
    grant = grant_of(leave(driver))
    driver.send(AbortLeg(key=LegKey("x", 0)))
    for name in ("r", "p", "x", "unknown"):
        assert leave(driver, name) == []
    release(driver, grant)
    driver.send(LeaseEnded(lease_id=1, why="expired"))
    assert_at_rest(driver.core)


def test_an_engine_that_is_drained_lets_legs_leave_or_end() -> None:
    """Draining refuses what is new and hurries nobody: a leg that is not asked to leave ends as it would have."""
    driver = make_driver()
    driver.send(make_submit("r", 6), make_submit("s", 6), Drain())
    driver.step()
    grant = grant_of(leave(driver))
    driver.run()
    assert driver.finish("s") == "length"
    assert driver.core.load().draining
    assert isinstance(driver.send(make_submit("late"))[0], FailOut)
    release(driver, grant)
    assert_at_rest(driver.core)
