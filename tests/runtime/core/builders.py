"""Builders for the tests of the decision core: configurations, legs, handles, and a driver without a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.messages import EngineEffect, EngineInput, LegKey, Submit, TokensOut
from kvferry_runtime.core.plan import Pick, Row, StepPlan, StepResult
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.handle import KVHandle
from kvferry_wire.layout import BLOCK_ORDER, LayoutDescriptor
from kvferry_wire.leg import Sampling
from kvferry_wire.limits import DEFAULT_LIMITS, Limits

EOS = 2
BLOCK = 4


def make_config(
    *,
    blocks: int = 17,
    block_size: int = BLOCK,
    budget: int = 64,
    max_running: int = 8,
    max_model_len: int = 0,
    limits: Limits = DEFAULT_LIMITS,
    **fields: object,
) -> CoreConfig:
    """16 usable blocks of 4 tokens unless said otherwise; the context is what they hold."""
    return CoreConfig(
        block_size=block_size,
        blocks=blocks,
        token_budget=budget,
        max_running=max_running,
        max_model_len=max_model_len or (blocks - 1) * block_size,
        hash_key=b"h" * 32,
        kv_key=b"k" * 32,
        limits=limits,
        **fields,
    )


def make_handle(tokens: int, *, block_size: int = BLOCK, **fields: object) -> KVHandle:
    """A handle for a prompt of so many tokens; the core looks at its counts alone."""
    values: dict[str, object] = {
        "lease_id": 1,
        "incarnation": b"i" * 16,
        "epoch": 1,
        "host": "127.0.0.1",
        "control_port": 1,
        "backends": {},
        "block_count": -(-tokens // block_size),
        "token_count": tokens,
        "compat_hash": "",
        "layout": LayoutDescriptor(block_size=block_size, tensor_parallel=1, order=BLOCK_ORDER, groups=()),
        "lease_ms": 15000,
        "prompt_digest": b"",
        **fields,
    }
    return KVHandle(**values)


def make_submit(
    name: str = "r",
    prompt: int | Sequence[int] = 6,
    *,
    attempt: int = 0,
    kind: str = "generate",
    n: int = 1,
    emitted: Sequence[Sequence[int]] | None = None,
    max_tokens: int = 4,
    deadline: float = 600.0,
    handle: KVHandle | None = None,
    eos: tuple[int, ...] = (EOS,),
    salt: bytes = b"",
    recompute: str = "",
    must_pull: bool = False,
    seed: int = 0,
    **sampling: object,
) -> Submit:
    """A greedy leg. `prompt`: its ids, or how many (ids are then the leg's own, so that no two legs share a block)."""
    ids = tuple(prompt) if not isinstance(prompt, int) else own_ids(name, prompt)
    fields: dict[str, object] = {"temperature": 0.0, "seed": seed, "max_tokens": max_tokens, **sampling}
    return Submit(
        key=LegKey(name, attempt),
        kind=kind,
        prompt_ids=ids,
        emitted=tuple(tuple(ids) for ids in emitted) if emitted is not None else ((),) * n,
        sampling=Sampling(**fields),
        extras=KeyExtras(tenant_salt=salt),
        deadline_s=deadline,
        eos_token_ids=eos,
        handle=handle,
        recompute=recompute,
        must_pull=must_pull,
    )


def own_ids(name: str, count: int) -> tuple[int, ...]:
    """Prompt ids that only this name has; none of them is end-of-sequence."""
    base = 1000 * (1 + sum(ord(letter) * 31**index for index, letter in enumerate(name)) % 900_000)
    return tuple(base + index for index in range(count))


@dataclass
class Driver:
    """A core that is stepped by hand: `token` says what each pick gives. Keeps all plans and effects."""

    core: EngineCore
    token: Callable[[Row, Pick], int] = lambda row, pick: 10_000 + pick.position
    now: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    effects: list[EngineEffect] = field(default_factory=list)
    check: bool = True

    def send(self, *events: EngineInput) -> list[EngineEffect]:
        """Give events to the core; the effects of these."""
        made: list[EngineEffect] = []
        for event in events:
            made += self.core.handle(event, self.now)
        return self._keep(made)

    def step(self) -> list[EngineEffect]:
        """One turn; the effects of it."""
        made = self.core.expire(self.now)
        plan, started = self.core.schedule(self.now)
        made += started
        if plan is not None:
            self.plans.append(plan)
            picks = tuple(self.token(row, pick) for row in plan.rows for pick in row.picks)
            made += self.core.commit(plan, StepResult(picks), self.now)
        return self._keep(made)

    def run(self, most: int = 500) -> list[EngineEffect]:
        """Step until nothing is computed any more; all effects of that."""
        made: list[EngineEffect] = []
        for _ in range(most):
            before = len(self.plans)
            made += self.step()
            if len(self.plans) == before:
                return made
        raise AssertionError(f"still working after {most} steps: {self.core!r}")

    @property
    def plan(self) -> StepPlan:
        """The last plan."""
        return self.plans[-1]

    def ids(self, name: str, choice: int = 0) -> list[int]:
        """All ids emitted for a leg's choice so far."""
        outs = [e for e in self.effects if isinstance(e, TokensOut) and e.key.internal_id == name]
        return [token for out in outs if out.choice == choice for token in out.ids]

    def finish(self, name: str, choice: int = 0) -> str | None:
        """The choice's finish reason; fails if it was told more than once."""
        outs = [e for e in self.effects if isinstance(e, TokensOut) and e.key.internal_id == name]
        told = [out.finish for out in outs if out.choice == choice and out.finish is not None]
        assert len(told) <= 1, told
        return told[0] if told else None

    def _keep(self, made: list[EngineEffect]) -> list[EngineEffect]:
        self.effects += made
        if self.check:
            self.core.check_integrity()
        return made


def make_driver(**config: object) -> Driver:
    """A driver of a fresh core; the arguments are those of ``make_config``."""
    return Driver(EngineCore(make_config(**config)))


def assert_at_rest(core: EngineCore) -> None:
    """Nothing lives, and every block is free or cached without a reference."""
    core.check_integrity()
    load = core.load()
    assert core.idle()
    assert (load.running, load.waiting, load.queued_tokens, load.leases) == (0, 0, 0, 0)
    assert load.free_blocks == load.total_blocks


def rows_of(plan: StepPlan) -> list[tuple[int, int]]:
    """(first position, number of tokens) of each row."""
    return [(row.first, len(row.token_ids)) for row in plan.rows]
