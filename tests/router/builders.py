"""Builders of the router's tests: a leg, its frames, a handle, a pod's description."""

from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import End, Prefilled, Tokens
from kvferry_wire.handle import KVHandle
from kvferry_wire.layout import BLOCK_ORDER, KVGroup, LayoutDescriptor
from kvferry_wire.leg import AnswerFormat, ChoiceState, Leg, Sampling

BLOCK_SIZE = 4


def make_layout() -> LayoutDescriptor:
    group = KVGroup(name="full", layers=1, kv_heads=1, head_dim=8, dtype="int64")
    return LayoutDescriptor(block_size=BLOCK_SIZE, tensor_parallel=1, order=BLOCK_ORDER, groups=(group,))


def make_handle(lease_id: int = 1, tokens: int = 8) -> KVHandle:
    return KVHandle(
        lease_id=lease_id,
        incarnation=bytes(16),
        epoch=1,
        host="127.0.0.1",
        control_port=1,
        backends={},
        block_count=-(-tokens // BLOCK_SIZE),
        token_count=tokens,
        compat_hash="compat",
        layout=make_layout(),
        lease_ms=15_000,
        prompt_digest=bytes(32),
    )


def make_leg(
    *, n: int = 1, stream: bool = True, prompt: tuple[int, ...] = tuple(range(8)), max_tokens: int = 16
) -> Leg:
    return Leg(
        internal_id="leg-1",
        attempt=0,
        request_id="req-1",
        deadline_ms=60_000,
        prompt_ids=prompt,
        choices=tuple(ChoiceState() for _ in range(n)),
        sampling=Sampling(seed=1, max_tokens=max_tokens),
        format=AnswerFormat(
            kind="chat", stream=stream, include_usage=False, response_id="chatcmpl-1", created=1, model="toy"
        ),
        extras=KeyExtras(),
    )


def make_prefilled(*first: int, handle: KVHandle | None = None) -> Prefilled:
    return Prefilled(first=first or (7,), cached_tokens=4, handle=handle)


def make_tokens(*ids: int, choice: int = 0, data: bytes = b"data: {}\n\n") -> Tokens:
    return Tokens(choice=choice, ids=ids, data=data, chars=len(ids))


def make_end(*, n: int = 1, completion_tokens: int = 1, data: bytes = b"data: [DONE]\n\n", recomputed: str = "") -> End:
    return End(
        data=data,
        finish=("stop",) * n,
        completion_tokens=completion_tokens,
        cached_tokens=4,
        recomputed=recomputed,
    )
