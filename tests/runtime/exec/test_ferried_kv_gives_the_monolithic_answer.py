"""Two engines and a byte copy between them: prefill here, decode there, the same tokens as one engine (B089)."""

import random

import msgspec
import pytest

from kvferry_runtime.core.messages import (
    AbortLeg,
    DropLease,
    HoldLease,
    LeaseEnded,
    PullFinished,
    StartPull,
    Submit,
    TokensOut,
)
from tests.runtime.core.builders import assert_at_rest
from tests.runtime.exec.toy_engines import Ferry, ToyEngine, check_answer, make_engine, make_toy_submit, random_submit


def make_ferry(**config: object) -> Ferry:
    return Ferry(make_engine(blocks=129, **config), make_engine(blocks=129, **config))


def assert_both_at_rest(ferry: Ferry) -> None:
    for lease_id in list(ferry.grants):
        ferry.source.send(LeaseEnded(lease_id=lease_id, why="expired"))
    assert_at_rest(ferry.source.core)
    assert_at_rest(ferry.target.core)


def pulls_of(effects: list[object]) -> list[StartPull]:
    return [effect for effect in effects if isinstance(effect, StartPull)]


def check_whole(target: ToyEngine, submit: Submit, leg: Submit) -> None:
    """The first tokens that the leg brought and what decode made are together the monolithic answer."""
    for choice, emitted in enumerate(leg.emitted):
        name = (leg.key.internal_id, leg.key.attempt, choice)
        target.ids[name] = list(emitted) + target.ids.get(name, [])
    check_answer(target, submit)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 15, 16, 17, 33, 200])
@pytest.mark.parametrize("n", [1, 3])
def test_lengths_around_block_borders(length: int, n: int) -> None:
    """B089: prompts below one block, at a border and beside it; nothing of the prompt is computed at decode."""
    ferry = make_ferry(budget=64)
    submit = make_toy_submit(
        "r", [length % 250, *list(range(length - 1))], n=n, temperature=1.0, seed=length, ignore_eos=True
    )
    first, grant = ferry.prefill(submit)
    assert grant is not None
    leg = ferry.decode_leg(submit, first, grant)
    assert isinstance(ferry.target.send(leg)[0], HoldLease)
    (pull,) = pulls_of(ferry.target.step())
    ferry.target.send(ferry.copy(pull))
    ferry.target.run()
    check_whole(ferry.target, submit, leg)
    assert_both_at_rest(ferry)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_over_the_ferry_with_failures(seed: int) -> None:
    """Pulls end late, out of order, well or badly; legs are aborted at every stage; whole answers are right."""
    source = random.Random(seed)
    ferry = Ferry(make_engine(blocks=257, budget=16), make_engine(blocks=source.randrange(13, 25), budget=16))
    in_flight: list[StartPull] = []
    legs: list[tuple[Submit, Submit]] = []
    aborted: set[str] = set()

    def take(effects: list[object]) -> None:
        in_flight.extend(pulls_of(effects))
        for effect in effects:
            if isinstance(effect, DropLease):
                for lease_id in [i for i, grant in ferry.grants.items() if grant.key == effect.key]:
                    if not any(pull.handle.lease_id == lease_id for pull in in_flight):
                        del ferry.grants[lease_id]
                        ferry.source.send(LeaseEnded(lease_id=lease_id, why="failed"))

    def finish(pull: StartPull) -> None:
        if source.random() < 0.3 or pull.handle.lease_id not in ferry.grants:
            if ferry.grants.pop(pull.handle.lease_id, None) is not None:
                ferry.source.send(LeaseEnded(lease_id=pull.handle.lease_id, why="expired"))
            for block in pull.blocks[0]:  # whatever arrived until then
                ferry.target.memory.block(0, block)[:] = bytes(
                    source.randbytes(len(ferry.target.memory.block(0, block)))
                )
            ferry.target.send(PullFinished(key=pull.key, reason="read_error"))
        else:
            ferry.target.send(ferry.copy(pull))

    for number in range(25):
        submit = random_submit(source, f"r{number}", longest=20, prefixes=[[], [1] * 9])
        submit = msgspec.structs.replace(submit, emitted=((),) * len(submit.emitted))
        first, grant = ferry.prefill(submit)
        if grant is None:
            continue
        leg = ferry.decode_leg(submit, first, grant)
        legs.append((submit, leg))
        take(ferry.target.send(leg))
        for _ in range(source.randrange(6)):
            take(ferry.target.step())
            if in_flight and source.random() < 0.4:
                finish(in_flight.pop(source.randrange(len(in_flight))))
        if source.random() < 0.2:
            victim = source.choice(legs)[1]
            aborted.add(victim.key.internal_id)
            take(ferry.target.send(AbortLeg(key=victim.key)))
    for _ in range(200):
        take(ferry.target.run())
        if not in_flight:
            break
        finish(in_flight.pop(0))
    whole = 0
    for submit, leg in legs:
        if submit.key.internal_id not in aborted:
            check_whole(ferry.target, submit, leg)
            whole += 1
    assert whole > 8
    assert not ferry.grants
    assert_both_at_rest(ferry)


@pytest.mark.parametrize("stage", ["held", "pulling", "pulled", "decoding"])
def test_an_abort_at_each_stage_leaves_nothing(stage: str) -> None:
    """Before, during and after the pull: both engines come to rest, and other legs are right."""
    ferry = make_ferry()
    submit = make_toy_submit("r", list(range(30)), ignore_eos=True)
    first, grant = ferry.prefill(submit)
    assert grant is not None
    effects = ferry.target.send(ferry.decode_leg(submit, first, grant))
    pull = None
    if stage != "held":
        (pull,) = pulls_of(ferry.target.step())
    if stage in ("pulled", "decoding"):
        assert pull is not None
        ferry.target.send(ferry.copy(pull))
    if stage == "decoding":
        ferry.target.step()
    effects = ferry.target.send(AbortLeg(key=submit.key))
    dropped = [effect for effect in effects if isinstance(effect, DropLease)]
    assert len(dropped) == (1 if stage in ("held", "pulling") else 0)
    if stage == "pulling":
        assert pull is not None
        ferry.target.send(ferry.copy(pull))
    other = make_toy_submit("other", list(range(100, 130)))
    ferry.target.send(other)
    ferry.target.run()
    check_answer(ferry.target, other)
    assert_both_at_rest(ferry)


def test_stale_bytes_after_a_failed_pull_are_never_computed_on() -> None:
    """A pull that failed half-way leaves half-right blocks: the prompt is computed again over them."""
    ferry = make_ferry()
    submit = make_toy_submit("r", list(range(30)))
    first, grant = ferry.prefill(submit)
    assert grant is not None
    leg = ferry.decode_leg(submit, first, grant)
    ferry.target.send(leg)
    (pull,) = pulls_of(ferry.target.step())
    half = len(pull.blocks[0]) // 2
    for block, origin in zip(pull.blocks[0][:half], grant.blocks[0], strict=False):
        ferry.target.memory.block(0, block)[:] = ferry.source.memory.block(0, origin)
    ferry.target.send(PullFinished(key=pull.key, reason="peer_dead"))
    effects = ferry.target.run()
    assert next(effect.recomputed for effect in effects if isinstance(effect, TokensOut)) == "peer_dead"
    check_whole(ferry.target, submit, leg)
    assert_both_at_rest(ferry)


def test_foreign_bytes_taken_for_valid_are_seen_by_the_oracle() -> None:
    """The check has teeth: KV of another prompt gives other tokens."""
    ferry = make_ferry()
    submit = make_toy_submit("r", list(range(30)), ignore_eos=True)
    first, grant = ferry.prefill(submit)
    _, foreign = ferry.prefill(make_toy_submit("f", list(range(1, 31)), ignore_eos=True))
    assert grant is not None
    assert foreign is not None
    leg = ferry.decode_leg(submit, first, grant)
    ferry.target.send(leg)
    (pull,) = pulls_of(ferry.target.step())
    ferry.grants[grant.lease_id] = msgspec.structs.replace(foreign, lease_id=grant.lease_id)
    ferry.target.send(ferry.copy(pull))
    ferry.target.run()
    with pytest.raises(AssertionError):
        check_whole(ferry.target, submit, leg)
