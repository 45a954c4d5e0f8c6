"""Legs move between two engines in the middle of their answers: the same tokens as one engine, from ferried KV."""

import random

import msgspec
import pytest

from kvferry_runtime.core.messages import (
    EngineEffect,
    FailOut,
    GrantLease,
    HandedOver,
    HandOver,
    LegKey,
    PullFinished,
    StartPull,
    Submit,
)
from tests.runtime.core.builders import assert_at_rest, make_handle
from tests.runtime.exec.toy_engines import Ferry, ToyEngine, check_answer, make_engine, make_toy_submit, random_submit


def step_on(engine: ToyEngine, ferry: Ferry | None) -> list[EngineEffect]:
    """One step; a pull is done as soon as it starts."""
    effects = engine.step()
    for pull in [effect for effect in effects if isinstance(effect, StartPull)]:
        assert ferry is not None
        effects += engine.send(ferry.copy(pull))
    return effects


def move(ferry: Ferry, leg: Submit) -> Submit:
    """Hand a leg over; the leg that goes on from there. Both of its attempts' tokens stay booked at their engines."""
    source, key = ferry.source, leg.key
    effects = source.send(HandOver(key=key))
    emitted = tuple(
        ids + tuple(source.ids.get((key.internal_id, key.attempt, choice), ()))
        for choice, ids in enumerate(leg.emitted)
    )
    moved = msgspec.structs.replace(leg, key=LegKey(key.internal_id, key.attempt + 1), emitted=emitted, handle=None)
    if isinstance(effects[0], FailOut):
        return moved
    grant, told = effects
    assert isinstance(grant, GrantLease)
    assert isinstance(told, HandedOver)
    ferry.grants[grant.lease_id] = grant
    size = source.core.config.block_size
    return msgspec.structs.replace(
        moved, handle=make_handle(grant.token_count, block_size=size, lease_id=grant.lease_id)
    )


def finish(engine: ToyEngine, ferry: Ferry | None, submit: Submit, leg: Submit) -> None:
    """Run the last leg to its end and judge the whole answer."""
    for _ in range(300):
        before = engine.core.steps
        effects = step_on(engine, ferry)
        if engine.core.steps == before and not effects:
            break
    for choice, emitted in enumerate(leg.emitted):
        name = (leg.key.internal_id, leg.key.attempt, choice)
        engine.ids[submit.key.internal_id, submit.key.attempt, choice] = list(emitted) + engine.ids.get(name, [])
        engine.finish[submit.key.internal_id, submit.key.attempt, choice] = engine.finish[name]
    check_answer(engine, submit)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", range(1, 14))
def test_at_every_step_of_an_answer(n: int, steps: int) -> None:
    """In the middle of a block, at its border, in the prompt: what was picked is never picked again."""
    ferry = Ferry(make_engine(blocks=65, budget=8), make_engine(blocks=65, budget=8))
    submit = make_toy_submit("r", list(range(21)), n=n, temperature=1.0, seed=steps, ignore_eos=True, max_tokens=14)
    ferry.source.send(submit)
    for _ in range(steps):
        ferry.source.step()
    leg = move(ferry, submit)
    told = dict(ferry.source.ids)
    ferry.source.run()
    assert ferry.source.ids == told
    ferry.target.send(leg)
    finish(ferry.target, ferry, submit, leg)
    assert not ferry.grants
    assert_at_rest(ferry.source.core)
    assert_at_rest(ferry.target.core)


def test_nothing_that_was_ferried_is_computed_again() -> None:
    """One choice in the middle of its answer: the first row at the new engine is the last emitted token."""
    ferry = Ferry(make_engine(blocks=65), make_engine(blocks=65))
    submit = make_toy_submit("r", list(range(21)), ignore_eos=True, max_tokens=20)
    ferry.source.send(submit)
    for _ in range(8):
        ferry.source.step()
    leg = move(ferry, submit)
    ferry.target.send(leg)
    (pull,) = [effect for effect in ferry.target.step() if isinstance(effect, StartPull)]
    ferry.target.send(ferry.copy(pull))
    plan, _ = ferry.target.core.schedule(0.0)
    assert plan is not None
    assert [(row.first, len(row.token_ids)) for row in plan.rows] == [(21 + 7, 1)]


@pytest.mark.parametrize("seed", range(8))
def test_random_moves_there_and_back(seed: int) -> None:
    """Several answers on small pools, moved several times, some by pulls that fail: each is whole and right."""
    source = random.Random(seed)
    engines = [make_engine(blocks=source.randrange(24, 40), budget=16) for _ in range(2)]
    for number in range(8):
        whole = random_submit(source, f"r{number}", longest=20, prefixes=[[], [1] * 9])
        submit = msgspec.structs.replace(whole, emitted=((),) * len(whole.emitted))
        at, ferry, leg = 0, None, submit
        engines[0].send(submit)
        for _ in range(source.randrange(1, 4)):
            for _ in range(source.randrange(1, 6)):  # one at least: what is to be pulled arrives first
                step_on(engines[at], ferry)
            name = (leg.key.internal_id, leg.key.attempt)
            if all((*name, choice) in engines[at].finish for choice in range(len(leg.emitted))):
                break
            ferry = Ferry(engines[at], engines[1 - at])
            leg = move(ferry, leg)
            at = 1 - at
            effects = engines[at].send(leg)
            if leg.handle is not None and source.random() < 0.3:
                effects = engines[at].step()
                for pull in [effect for effect in effects if isinstance(effect, StartPull)]:
                    engines[at].send(PullFinished(key=pull.key, reason="peer_dead"))
        finish(engines[at], ferry, submit, leg)
    assert engines[0].core.steps + engines[1].core.steps > 20
