"""Real engines (core, runner, KV memory) around the toy model, its oracle, and a ferry made of a byte copy."""

import random
from dataclasses import dataclass, field

import msgspec

from kvferry_runtime.core.endings import banned_ids, ending
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.messages import (
    EngineEffect,
    EngineInput,
    FailOut,
    GrantLease,
    LeaseEnded,
    PrefilledOut,
    PullFinished,
    StartPull,
    Submit,
    TokensOut,
)
from kvferry_runtime.core.plan import Pick
from kvferry_runtime.engine.loop import Engine
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.exec.runner import ModelRunner
from kvferry_runtime.model.toy import ToyModel
from kvferry_runtime.model.toy_oracle import ToyOracle, toy_scores
from kvferry_runtime.model.toy_spec import ToySpec
from tests.runtime.core.builders import make_config, make_handle, make_submit
from tests.runtime.exec.sampler_twin import pick_one

SPEC = ToySpec(vocab=300, layers=2, heads=1, dim=2, eos_every=25)
EOS = SPEC.eos_token_id


@dataclass
class ToyEngine:
    """An engine with a clock that stands still unless moved, and all that it said, by leg and choice."""

    engine: Engine
    memory: KVMemory
    clock: list[float]
    ids: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    finish: dict[tuple[str, int, int], str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    steps: int = 0

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    def send(self, event: EngineInput) -> list[EngineEffect]:
        return self._keep(self.engine.handle(event))

    def step(self) -> list[EngineEffect]:
        self.steps += 1
        return self._keep(self.engine.step())

    def run(self, most: int = 3000) -> list[EngineEffect]:
        """Step while something is computed."""
        made: list[EngineEffect] = []
        for _ in range(most):
            before = self.core.steps
            made += self.step()
            if self.core.steps == before:
                return made
        raise AssertionError(f"still working: {self.core!r}")

    def _keep(self, effects: list[EngineEffect]) -> list[EngineEffect]:
        for effect in effects:
            if isinstance(effect, TokensOut):
                name = (effect.key.internal_id, effect.key.attempt, effect.choice)
                assert name not in self.finish, f"{name} goes on after its end"
                self.ids.setdefault(name, []).extend(effect.ids)
                if effect.finish is not None:
                    self.finish[name] = effect.finish
            elif isinstance(effect, FailOut):
                assert effect.key.internal_id not in self.failed
                self.failed[effect.key.internal_id] = effect.kind
        self.core.check_integrity()
        return effects


def make_engine(*, spec: ToySpec = SPEC, blocks: int = 13, block_size: int = 4, **config: object) -> ToyEngine:
    """A toy engine whose KV memory starts full of a pattern that is no right KV."""
    clock = [0.0]
    model = ToyModel(spec)
    memory = KVMemory(model.kv_groups(), block_size, blocks)
    memory.poison()
    core = EngineCore(make_config(blocks=blocks, block_size=block_size, vocab_size=spec.vocab, **config))
    return ToyEngine(Engine(core, ModelRunner(model, memory), lambda: clock[0]), memory, clock)


def make_toy_submit(name: str, prompt: list[int], **fields: object) -> Submit:
    """A leg for the toy model."""
    return make_submit(name, prompt, **{"eos": (EOS,), "max_tokens": 12, **fields})


def oracle(submit: Submit, choice: int, max_model_len: int, spec: ToySpec = SPEC) -> tuple[list[int], str]:
    """All ids of one choice (emitted ones included) and its finish, from token ids alone."""
    model = ToyOracle(spec)
    for token in submit.prompt_ids:
        model.feed(token)
    emitted = list(submit.emitted[choice])
    for token in emitted:
        model.feed(token)
    seed = (submit.sampling.seed + choice) % 2**63
    while True:
        end = ending(submit.sampling, submit.eos_token_ids, emitted, len(submit.prompt_ids), max_model_len)
        if end is not None:
            return emitted, end.finish
        banned = banned_ids(submit.sampling, submit.eos_token_ids, len(emitted))
        pick = Pick(choice, len(submit.prompt_ids) + len(emitted), seed, submit.sampling, banned)
        token, _ = pick_one(toy_scores(model.candidates(), spec), pick)
        emitted.append(token)
        model.feed(token)


def random_submit(
    source: random.Random, name: str, *, longest: int, prefixes: list[list[int]], **more: object
) -> Submit:
    """Anything that the engine takes: shared prefixes, choices, samplings, stop ids, resumed legs."""
    prompt = list(source.choice(prefixes)) + [source.randrange(256) for _ in range(source.randrange(1, longest))]
    n = source.choice([1, 1, 1, 2, 3])
    fields: dict[str, object] = {
        "n": n,
        "max_tokens": source.choice([1, 2, 5, 12, 25]),
        "min_tokens": source.choice([0, 0, 4]),
        "temperature": source.choice([0.0, 0.0, 1.0, 1.5]),
        "top_k": source.choice([0, 0, 2]),
        "top_p": source.choice([1.0, 0.8]),
        "seed": source.randrange(2**63),
        "stop_token_ids": tuple(source.sample(range(32, 127), source.choice([0, 0, 6]))),
        "ignore_eos": source.random() < 0.2,
        "salt": source.choice([b"", b"tenant"]),
    }
    submit = make_toy_submit(name, prompt, **{**fields, **more})
    if source.random() < 0.2:  # a resumed leg: some ids were emitted elsewhere
        whole = [oracle(submit, choice, 10_000)[0] for choice in range(n)]
        emitted = tuple(tuple(ids[: source.randrange(len(ids) + 1)]) for ids in whole)
        submit = msgspec.structs.replace(submit, emitted=emitted)
    return submit


def check_answer(engine: ToyEngine, submit: Submit) -> None:
    """Each choice of a finished leg is exactly the oracle's."""
    for choice, emitted in enumerate(submit.emitted):
        name = (submit.key.internal_id, submit.key.attempt, choice)
        ids, finish = oracle(submit, choice, engine.core.config.max_model_len)
        assert list(emitted) + engine.ids.get(name, []) == ids, name
        assert engine.finish[name] == finish


@dataclass
class Ferry:
    """Copies leased blocks of one engine into pulled blocks of another, as a transfer would."""

    source: ToyEngine
    target: ToyEngine
    grants: dict[int, GrantLease] = field(default_factory=dict)

    def prefill(self, submit: Submit) -> tuple[tuple[int, ...], GrantLease | None]:
        """Run a prefill leg to its answer: first tokens and lease."""
        self.source.send(msgspec.structs.replace(submit, kind="prefill"))
        effects = self.source.run()
        (answer,) = [effect for effect in effects if isinstance(effect, PrefilledOut)]
        grant = next((effect for effect in effects if isinstance(effect, GrantLease)), None)
        if grant is not None:
            self.grants[grant.lease_id] = grant
        return answer.first, grant

    def decode_leg(self, submit: Submit, first: tuple[int, ...], grant: GrantLease) -> Submit:
        """The generate leg that goes on from a prefill answer."""
        block_size = self.source.core.config.block_size
        handle = make_handle(grant.token_count, block_size=block_size, lease_id=grant.lease_id)
        return msgspec.structs.replace(submit, emitted=tuple((token,) for token in first), handle=handle)

    def copy(self, pull: StartPull) -> PullFinished:
        """All bytes of a pull; the lease ends with it."""
        grant = self.grants.pop(pull.handle.lease_id)
        for from_group, to_group in zip(grant.blocks, pull.blocks, strict=True):
            for from_block, to_block in zip(from_group, to_group, strict=True):
                self.target.memory.block(0, to_block)[:] = self.source.memory.block(0, from_block)
        self.source.send(LeaseEnded(lease_id=grant.lease_id, why="released"))
        return PullFinished(key=pull.key)
