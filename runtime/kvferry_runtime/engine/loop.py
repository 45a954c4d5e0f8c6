"""The engine in one object: decision core and model runner, no process, no thread, no transfer.

``process`` puts sockets and the transfer threads around it; benchmarks and tests use it as it is.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.messages import EngineEffect, EngineInput, Submit
from kvferry_runtime.core.plan import StepPlan, StepResult
from kvferry_runtime.exec.budget import default_token_budget
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.exec.runner import ModelRunner
from kvferry_runtime.model.loader import LoadedModel, load_model
from kvferry_wire.limits import DEFAULT_LIMITS, Limits


class Runner(Protocol):
    """What computes a plan."""

    def step(self, plan: StepPlan) -> StepResult:
        """See ``ModelRunner.step``."""
        ...


class Engine:
    """Schedule, run, commit.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, core: EngineCore, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.runner = runner
        self._clock = clock

    def add(self, submit: Submit) -> list[EngineEffect]:
        """Take a leg."""
        return self.handle(submit)

    def handle(self, event: EngineInput) -> list[EngineEffect]:
        """Take any event."""
        return self.core.handle(event, self._clock())

    def step(self) -> list[EngineEffect]:
        """One turn of the loop: expire, schedule, and compute if there is something to compute.

        An error of the runner fails the legs of its step with `internal` and is raised again as ``StepFailedError``,
        which carries the effects: whether the engine goes on is the caller's decision.
        """
        now = self._clock()
        effects = self.core.expire(now)
        plan, started = self.core.schedule(now)
        effects += started
        if plan is None:
            return effects
        try:
            picked = self.runner.step(plan)
        except Exception as error:
            effects += self.core.abandon(plan, "the engine failed to compute this request")
            raise StepFailedError(effects) from error
        return effects + self.core.commit(plan, picked, self._clock())

    @property
    def has_work(self) -> bool:
        """Whether ``step`` may compute something without another event."""
        return self.core.has_work()


class StepFailedError(RuntimeError):
    """The runner raised; ``effects`` are those of the whole turn, the failed legs included."""

    def __init__(self, effects: list[EngineEffect]) -> None:
        super().__init__("a step failed")
        self.effects = effects


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what it was built of."""

    engine: Engine
    loaded: LoadedModel
    memory: KVMemory
    config: CoreConfig


def build_engine(
    source: str,
    *,
    dtype: str = "auto",
    attention: str = "auto",
    block_size: int = 16,
    kv_blocks: int = 0,
    kv_bytes: int = 256 * 2**20,
    max_model_len: int = 0,
    max_running: int = 64,
    token_budget: int = 0,
    prefix_caching: bool = True,
    limits: Limits = DEFAULT_LIMITS,
    hash_key: bytes = bytes(32),
    kv_key: bytes = bytes(32),
    clock: Callable[[], float] = time.monotonic,
) -> BuiltEngine:
    """Load a model and put an engine around it.

    Args:
        source: what ``load_model`` takes.
        kv_blocks: usable KV blocks; 0 takes as many as fit into `kv_bytes`.
        max_model_len: 0 takes the model's own, or what the KV blocks hold if that is less.
        token_budget: 0 takes ``default_token_budget``, and not less than `max_running`.
    """
    loaded = load_model(source, dtype, attention=attention)
    groups = loaded.model.kv_groups()
    per_block = sum(group.block_bytes(block_size) for group in groups)
    usable = kv_blocks or max(1, kv_bytes // per_block - 1)
    memory = KVMemory(groups, block_size, usable + 1)
    config = CoreConfig(
        block_size=block_size,
        blocks=usable + 1,
        token_budget=token_budget or max(max_running, default_token_budget(loaded.config)),
        max_running=max_running,
        max_model_len=max_model_len or min(loaded.config.max_model_len, usable * block_size),
        hash_key=hash_key,
        kv_key=kv_key,
        limits=limits,
        prefix_caching=prefix_caching,
        vocab_size=loaded.config.vocab_size,
    )
    engine = Engine(EngineCore(config), ModelRunner(loaded.model, memory), clock)
    return BuiltEngine(engine, loaded, memory, config)
