"""The toy model behind core, runner and KV memory: tokens equal the oracle's, exactly, in tiny pools (B007, B019)."""

import random

import pytest

from kvferry_runtime.core.messages import AbortLeg, StopChoice, Submit
from kvferry_runtime.engine.loop import StepFailedError, build_engine
from tests.runtime.core.builders import assert_at_rest
from tests.runtime.exec.toy_engines import (
    check_answer,
    make_engine,
    make_toy_submit,
    oracle,
    random_submit,
)


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes_in_tiny_pools_equal_the_oracle(seed: int) -> None:
    """8 to 16 blocks, budgets from 3 tokens, n, sampling, aborts, stops, deadlines: every whole answer is right."""
    source = random.Random(seed)
    engine = make_engine(
        blocks=source.randrange(9, 18),
        budget=source.choice([3, 7, 16, 64]),
        max_running=source.choice([2, 4, 8]),
        prefix_caching=source.random() < 0.8,
    )
    prefixes = [[], [1] * 8, [2] * 13]
    submits: list[Submit] = []
    given_up: set[str] = set()
    stopped: set[tuple[str, int]] = set()
    for number in range(25):
        deadline = source.choice([1000.0, 1000.0, 1000.0, 3.0])
        submit = random_submit(source, f"r{number}", longest=12, prefixes=prefixes, deadline=deadline)
        engine.send(submit)
        if deadline < 1000:
            given_up.add(submit.key.internal_id)
        submits.append(submit)
        for _ in range(source.randrange(8)):
            engine.step()
            engine.clock[0] += 0.1
        victim = source.choice(submits)
        if source.random() < 0.15:
            engine.send(AbortLeg(key=victim.key))
            given_up.add(victim.key.internal_id)
        elif source.random() < 0.15:
            choice = source.randrange(len(victim.emitted))
            engine.send(StopChoice(key=victim.key, choice=choice))
            stopped.add((victim.key.internal_id, choice))
    engine.run()
    whole = 0
    for submit in submits:
        name = submit.key.internal_id
        for choice, emitted in enumerate(submit.emitted):
            ids, finish = oracle(submit, choice, engine.core.config.max_model_len)
            got = list(emitted) + engine.ids.get((name, 0, choice), [])
            assert got == ids[: len(got)], (name, choice)
            ended = engine.finish.get((name, 0, choice))
            if name not in given_up and (name, choice) not in stopped and name not in engine.failed:
                assert (got, ended) == (ids, finish), (name, choice)
                whole += 1
    assert whole > 15
    assert set(engine.failed.values()) <= {"deadline", "invalid"}
    engine.core.expire(1e9)
    assert_at_rest(engine.core)


def test_three_choices_and_preemption_together() -> None:
    """B007: n=3, max_tokens 100, temperature 0.8, seed 1, and a pool that holds one answer and a half."""
    engine = make_engine(blocks=41)
    submits = [
        make_toy_submit(f"r{n}", list(range(n, n + 10)), n=3, max_tokens=100, temperature=0.8, seed=1, ignore_eos=True)
        for n in range(2)
    ]
    for submit in submits:
        engine.send(submit)
    engine.run()
    assert engine.core.preemptions > 0
    for submit in submits:
        check_answer(engine, submit)
    assert_at_rest(engine.core)


def test_a_prefix_served_from_the_cache_changes_no_token() -> None:
    """B019: 20 prompts with a common prefix, first cold, then warm."""
    engine = make_engine(blocks=129)
    prompts = [[7] * 100 + [n, n + 1] for n in range(20)]
    for attempt in range(2):
        for number, prompt in enumerate(prompts):
            engine.send(make_toy_submit(f"r{number}", prompt, attempt=attempt, max_tokens=8))
        engine.run()
    for number, prompt in enumerate(prompts):
        check_answer(engine, make_toy_submit(f"r{number}", prompt, max_tokens=8))
        assert engine.ids[f"r{number}", 0, 0] == engine.ids[f"r{number}", 1, 0]
    assert_at_rest(engine.core)


def test_a_wrong_block_gives_a_wrong_token() -> None:
    """The oracle sees a planted fault: one block of the context overwritten between two steps."""
    engine = make_engine()
    submit = make_toy_submit("r", list(range(10)), ignore_eos=True)
    engine.send(submit)
    engine.step()
    engine.memory.poison([1])
    engine.run()
    with pytest.raises(AssertionError):
        check_answer(engine, submit)


def test_a_step_that_fails_ends_its_legs_and_leaves_the_engine_whole() -> None:
    """The runner raises once: the legs of that step fail as internal, others are answered."""
    engine = make_engine()
    bad, good = make_toy_submit("bad", [1, 2, 3]), make_toy_submit("good", [4, 5, 6])
    engine.send(bad)
    runner = engine.engine.runner

    class Broken:
        def step(self, plan: object) -> None:
            raise ZeroDivisionError

    engine.engine.runner = Broken()
    with pytest.raises(StepFailedError) as caught:
        engine.engine.step()
    engine._keep(caught.value.effects)
    assert engine.failed == {"bad": "internal"}
    engine.engine.runner = runner
    engine.send(good)
    engine.run()
    check_answer(engine, good)
    assert_at_rest(engine.core)


def test_an_engine_is_built_from_a_name() -> None:
    """``build_engine`` sizes the KV memory and the context, by blocks or by bytes."""
    built = build_engine("toy:ctx=512,eos_every=0", kv_blocks=20)
    assert (built.config.usable_blocks, built.config.max_model_len, built.memory.blocks) == (20, 320, 21)
    assert built.engine.add(make_toy_submit("r", [1, 2, 3], max_tokens=2)) == []
    assert built.engine.has_work
    while built.engine.has_work:
        built.engine.step()
    assert_at_rest(built.engine.core)
    by_bytes = build_engine("toy:ctx=512", kv_bytes=2**20)
    assert by_bytes.memory.nbytes <= 2**20 < by_bytes.memory.nbytes + 2 * 256
    assert by_bytes.config.max_model_len == 512
