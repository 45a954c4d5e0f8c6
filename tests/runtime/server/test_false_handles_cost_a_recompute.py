"""A sample of false handles on real pods: every answer is the oracle's, and tells why it was computed again."""

import asyncio
import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import aiohttp
import msgspec
import pytest

from kvferry_runtime.model.toy_oracle import toy_next_tokens
from kvferry_service.key_files import load_keys
from kvferry_wire.frames import End, Prefilled, Tokens
from kvferry_wire.handle import KVHandle
from kvferry_wire.leg import ChoiceState, Leg
from tests.runtime.server.harness import PodProcess, abort, frames, freed_within, make_leg, running_pod

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

TOKENS = 12
ROUNDS = 8


@dataclass
class Pair:
    """Two pods, and the key that their handles are signed with."""

    prefill: PodProcess
    decode: PodProcess
    kv_key: bytes

    def signed(self, handle: KVHandle, **changes: object) -> KVHandle:
        return msgspec.structs.replace(handle, **changes).signed(self.kv_key)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("false")
    with (
        running_pod(folder / "p", "--role", "prefill", "--lease", "20") as prefill,
        running_pod(folder / "d", "--role", "decode", "--lease", "20", keys=prefill.keys) as decode,
    ):
        assert prefill.keys is not None
        kv_key = load_keys(prefill.keys, need_kv=True).kv
        assert kv_key is not None
        yield Pair(prefill, decode, kv_key)


Forge = Callable[[Pair, KVHandle, KVHandle], KVHandle]

# How a leg's own handle, or that of another leg, becomes a false one; and the reasons that its answer may tell.
FALSE: dict[str, tuple[Forge, set[str]]] = {
    "changed without the key": (lambda p, own, other: msgspec.structs.replace(own, lease_id=own.lease_id + 1), {"mac"}),
    "signed by another service": (lambda p, own, other: own.signed(b"x" * 32), {"mac"}),
    "of another request": (lambda p, own, other: other, {"digest"}),
    "another lease with this digest": (lambda p, own, other: p.signed(own, lease_id=other.lease_id), {"lease_unknown"}),
    "never granted": (lambda p, own, other: p.signed(own, lease_id=10**6), {"lease_unknown"}),
    "of an earlier epoch": (lambda p, own, other: p.signed(own, epoch=own.epoch - 1), {"lease_unknown"}),
    "of an earlier life": (lambda p, own, other: p.signed(own, incarnation=b"e" * 16), {"lease_unknown"}),
    "fewer blocks than tokens": (lambda p, own, other: p.signed(own, block_count=1), {"handle"}),
    "more tokens than the request": (lambda p, own, other: p.signed(own, token_count=10**6), {"handle"}),
    "checksums of other blocks": (lambda p, own, other: p.signed(own, checksums=other.checksums), {"checksum"}),
    "checksums that are missing": (lambda p, own, other: p.signed(own, checksums=()), {"handle"}),
    "another layout": (
        lambda p, own, other: p.signed(own, layout=msgspec.structs.replace(own.layout, block_size=8)),
        {"mismatch"},
    ),
    "nobody there": (lambda p, own, other: p.signed(own, control_port=9), {"peer_dead"}),
}


async def prefilled(client: aiohttp.ClientSession, leg: Leg) -> Prefilled:
    answer = (await frames(client, "prefill", leg))[-1]
    assert isinstance(answer, Prefilled) and answer.handle is not None
    return answer


async def decode_with(client: aiohttp.ClientSession, leg: Leg, first: tuple[int, ...], handle: KVHandle) -> str:
    """Send the decode leg with this handle; the answer must be the oracle's. Returns why it was recomputed."""
    second = msgspec.structs.replace(leg, attempt=leg.attempt + 1, handle=handle, choices=(ChoiceState(emitted=first),))
    got = await frames(client, "generate", second)
    ids = [token for frame in got if isinstance(frame, Tokens) for token in frame.ids]
    assert [*first, *ids] == toy_next_tokens(leg.prompt_ids, TOKENS), leg.internal_id
    assert isinstance(got[-1], End)
    return got[-1].recomputed


def make_own(name: str) -> Leg:
    prompt = f"{name}: a prompt of three blocks, long enough to be worth it."
    return make_leg(name, prompt=prompt, sampling={"max_tokens": TOKENS})


async def test_every_false_handle_costs_a_recompute_and_no_token(pair: Pair) -> None:
    """Thirteen kinds at a time, again and again; each kind says its reason, and the pods are empty afterwards."""
    told: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in FALSE}

    async def attempt(kind: str, number: int, prefill: aiohttp.ClientSession, decode: aiohttp.ClientSession) -> None:
        own, other = (make_own(f"{kind} {number} {which}") for which in ("one", "two"))
        first, second = await prefilled(prefill, own), await prefilled(prefill, other)
        assert first.handle is not None and second.handle is not None
        false = FALSE[kind][0](pair, first.handle, second.handle)
        told[kind][await decode_with(decode, own, first.first, false)] += 1
        for leg in (own, other):
            await abort(prefill, leg)

    async with pair.prefill.client() as prefill, pair.decode.client() as decode:
        for number in range(ROUNDS):
            await asyncio.gather(*(attempt(kind, number, prefill, decode) for kind in FALSE))
        for kind, (_, reasons) in FALSE.items():
            assert told[kind].total() == ROUNDS
            assert set(told[kind]) <= reasons, kind
        await freed_within(prefill, 2.0)
        await freed_within(decode, 2.0)


async def test_a_handle_that_was_read_is_good_no_more(pair: Pair) -> None:
    """Consumed and offered again, one after the other and at the same time: one leg has the KV, all have the answer."""
    async with pair.prefill.client() as prefill, pair.decode.client() as decode:
        for number in range(ROUNDS):
            own = make_own(f"again {number}")
            answer = await prefilled(prefill, own)
            assert answer.handle is not None
            legs = [msgspec.structs.replace(own, internal_id=f"again {number} {copy}") for copy in range(4)]
            reasons = await asyncio.gather(*(decode_with(decode, leg, answer.first, answer.handle) for leg in legs))
            assert reasons.count("") >= 1
            assert set(reasons) <= {"", "lease_unknown", "cached"}
            assert await decode_with(decode, own, answer.first, answer.handle) in {"", "lease_unknown", "cached"}
        await freed_within(prefill, 2.0)
        await freed_within(decode, 2.0)
