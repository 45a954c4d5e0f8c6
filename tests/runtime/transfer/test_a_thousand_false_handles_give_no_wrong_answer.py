"""Over a thousand handles that are not what they claim: each is recomputed, or gives exactly the prompt's own KV.

Every block's bytes follow from the ids up to its end, so that KV of another prompt, of another place or of another time
is seen at once. Each attempt goes the way of an engine: `check`, then the pull; what passes both is compared byte for
byte. Genuine handles between them show that the transfer is not just refusing everything.
"""

import collections
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from kvferry_runtime.core.messages import LegKey, PullFinished
from kvferry_runtime.transfer.backends.tcp import TcpDescriptor
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.data import encode
from kvferry_wire.handle import KVHandle
from kvferry_wire.hashing import CompatFields, prompt_digest
from tests.runtime.transfer.builders import (
    FULL,
    KV_KEY,
    SLIDING,
    Engine,
    make_engine,
    make_limits,
    make_submit,
    running,
)

BLOCK_BYTES = FULL.block_bytes(16)
BLOCKS = 512
AT_ONCE = 24
LIMITS = make_limits(lease_s=30.0, connect_s=0.3, transfer_floor_s=0.6)
OWNERS_OTHER_KEY = b"another service's key"[:21] + b"!" * 11


def block_bytes_of(prompt: tuple[int, ...], index: int) -> bytes:
    """What the block holds if it is right: it depends on all ids up to its end, as KV does."""
    seed = hashlib.blake2b(repr(prompt[: (index + 1) * 16]).encode(), digest_size=32).digest()
    return (seed * (BLOCK_BYTES // 32 + 1))[:BLOCK_BYTES]


@dataclass
class Lent:
    """A prompt whose KV the owner keeps."""

    prompt: tuple[int, ...]
    handle: KVHandle
    blocks: tuple[int, ...]


@dataclass
class Ferry:
    """One owner, one reader, and what came of all attempts."""

    rng: random.Random
    owner: Engine
    reader: Engine
    attempts: collections.Counter[str] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    genuine: int = 0
    tokens: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def lend(self, blocks: int = 3, *, like: tuple[int, ...] = ()) -> Lent:
        """A new prompt, computed into blocks that others may have had before. `like`: it begins alike."""
        length = blocks * 16 - self.rng.randrange(16)
        prompt = (*like, *(next(self.tokens) for _ in range(length - len(like))))
        ids = tuple(self.rng.sample(range(1, BLOCKS), blocks))
        for index, block_id in enumerate(ids):
            self.owner.memory.block(0, block_id)[:] = block_bytes_of(prompt, index)
        return Lent(prompt, self.owner.grant((ids,), prompt), ids)

    def give_back(self, lent: Lent) -> None:
        self.owner.service.withdraw(lent.handle.lease_id)

    def offer(self, kind: str, prompt: tuple[int, ...], handle: KVHandle, extras: KeyExtras | None = None) -> None:
        self.offer_all(kind, [(prompt, handle, extras or KeyExtras())])

    def offer_all(self, kind: str, offers: list[tuple[tuple[int, ...], KVHandle, KeyExtras]]) -> None:
        """Take handles for prompts as an engine would, all at the same time, and judge what becomes KV."""
        waiting: dict[LegKey, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        places = iter(range(1, BLOCKS))
        for prompt, handle, extras in offers:
            self.attempts[kind] += 1
            reason = self.reader.service.check(make_submit(prompt, handle, extras=extras))
            if reason:
                self.reasons[reason] += 1
                continue
            local = tuple(next(places) for _ in range(handle.block_count))
            for block_id in local:
                self.reader.memory.block(0, block_id)[:] = bytes(BLOCK_BYTES)
            waiting[self.reader.start_pull(handle, (local,), deadline_s=5.0)] = (prompt, local)
        while waiting:
            finished = self.reader.next_post()
            assert isinstance(finished, PullFinished)
            prompt, local = waiting.pop(finished.key)
            self.reasons[finished.reason or "valid"] += 1
            if finished.reason:
                continue
            self.genuine += 1
            for index, block_id in enumerate(local):
                found = bytes(self.reader.memory.block(0, block_id))
                assert found == block_bytes_of(prompt, index), f"{kind}: block {index} is not the prompt's"


def signed(handle: KVHandle, **changes: object) -> KVHandle:
    """Changed with the key, as by a confused or taken-over engine of the service."""
    return msgspec.structs.replace(handle, **changes).signed(KV_KEY)


def forged(ferry: Ferry) -> None:
    """Changed without the key: each field, random values; and signed with the key of another service."""
    rng = ferry.rng
    lent = ferry.lend()
    values: dict[str, Callable[[], object]] = {
        "lease_id": lambda: rng.randrange(2**31),
        "incarnation": lambda: rng.randbytes(16),
        "epoch": lambda: rng.randrange(2, 99),
        "host": lambda: f"127.0.0.{rng.randrange(2, 250)}",
        "control_port": lambda: rng.randrange(1, 2**16),
        "backends": lambda: {"tcp": rng.randbytes(4)},
        "blocks": lambda: (tuple(rng.sample(range(BLOCKS), 3)),),
        "block_count": lambda: rng.randrange(4, 99),
        "token_count": lambda: rng.randrange(1, 30),
        "compat_hash": lambda: rng.randbytes(8).hex(),
        "compat": lambda: CompatFields(
            protocol_version=3, model_digest="m", dtype="d", kv_dtype="k", kv_groups=(), hash_key_id="x"
        ),
        "layout": lambda: msgspec.structs.replace(lent.handle.layout, block_size=rng.choice((1, 8, 32))),
        "lease_ms": lambda: rng.randrange(10**9),
        "checksum": lambda: rng.choice(("", "crc32")),
        "checksums": lambda: (rng.randbytes(24),),
        "prompt_digest": lambda: rng.randbytes(32),
        "mac": lambda: rng.randbytes(32),
    }
    assert set(values) == set(KVHandle.__struct_fields__)
    for name, value in values.items():
        ferry.offer("forged", lent.prompt, msgspec.structs.replace(lent.handle, **{name: value()}))
    ferry.offer("forged", lent.prompt, lent.handle.signed(OWNERS_OTHER_KEY))
    ferry.give_back(lent)


def stale(ferry: Ferry) -> None:
    """The lease is over, and its blocks hold another prompt's KV by now; or it is of another epoch or incarnation."""
    offers = []
    for _ in range(AT_ONCE // 2):
        lent = ferry.lend()
        ferry.give_back(lent)
        other = ferry.lend(like=lent.prompt[:16])
        for index, block_id in enumerate(lent.blocks):
            if block_id not in other.blocks:
                ferry.owner.memory.block(0, block_id)[:] = block_bytes_of(other.prompt, index)
        offers.append((lent.prompt, lent.handle, KeyExtras()))
        for changes in ({"epoch": 0}, {"epoch": 7}, {"incarnation": ferry.rng.randbytes(16)}):
            offers.append((other.prompt, signed(other.handle, **changes), KeyExtras()))
        ferry.give_back(other)
    ferry.offer_all("stale", offers)


def consumed(ferry: Ferry) -> None:
    """Read once, whole and rightly; then offered again, after its blocks were taken by another prompt."""
    lent = ferry.lend()
    ferry.offer("genuine", lent.prompt, lent.handle)
    for index, block_id in enumerate(lent.blocks):
        ferry.owner.memory.block(0, block_id)[:] = block_bytes_of(lent.prompt[::-1], index)
    ferry.offer_all("consumed", [(lent.prompt, lent.handle, KeyExtras())] * 8)


def reused(ferry: Ferry) -> None:
    """One handle for many legs at a time: at most one of them has the KV, and has all of it."""
    lent = ferry.lend(blocks=6)
    before = ferry.genuine
    ferry.offer_all("reused", [(lent.prompt, lent.handle, KeyExtras())] * 8)
    assert ferry.genuine - before <= 1
    ferry.give_back(lent)


def swapped(ferry: Ferry) -> None:
    """The handle of another request: prompts that begin alike, another tenant, another adapter, one id off; with the
    key, the lease of one and the digest of the other."""
    first = ferry.lend()
    second = ferry.lend(like=first.prompt[:32])
    offers = [
        (second.prompt, first.handle, KeyExtras()),
        (first.prompt, second.handle, KeyExtras()),
        (first.prompt, first.handle, KeyExtras(tenant_salt=b"t")),
        (first.prompt, first.handle, KeyExtras(adapter="a")),
        ((*first.prompt[:-1], first.prompt[-1] + 1), first.handle, KeyExtras()),
    ]
    digest = second.handle.prompt_digest
    count = second.handle.token_count
    offers.append((second.prompt, signed(first.handle, prompt_digest=digest, token_count=count), KeyExtras()))
    offers.append((first.prompt, signed(first.handle, lease_id=second.handle.lease_id), KeyExtras()))
    ferry.offer_all("swapped", offers)
    for lent in (first, second):
        ferry.give_back(lent)


def mis_shaped(ferry: Ferry) -> None:
    """Rightly signed, and contradicting itself, its lease or the request: counts, layouts, checksums, descriptors."""
    lent = ferry.lend()
    handle, layout = lent.handle, lent.handle.layout
    longer, fewer = (*lent.prompt, *range(7, 23)), lent.prompt[:16]
    whole = KeyExtras()
    changes: list[dict[str, object]] = [
        *({"block_count": count} for count in (-1, 0, 2, 4, 10**6)),
        *({"token_count": count} for count in (-1, 0, 1, 16, 10**6)),
        *({"lease_ms": value} for value in (0, -5)),
        *({"control_port": port} for port in (0, -1, 2**16)),
        *({"checksums": sums} for sums in ((), (b"",), (b"x" * 23,), (b"x" * 24,) * 2, (b"x" * 24,))),
        {"checksum": "md5"},
        {"backends": {}},
        {"backends": {"nixl": b"x"}},
        {"backends": {"tcp": b"\xc1"}},
        {"backends": {"tcp": encode(TcpDescriptor(0))}},
        {"compat_hash": ""},
        *({"layout": msgspec.structs.replace(layout, block_size=size)} for size in (8, 32)),
        {"layout": msgspec.structs.replace(layout, tensor_parallel=2)},
        {"layout": msgspec.structs.replace(layout, order="head,block")},
        {"layout": msgspec.structs.replace(layout, groups=(SLIDING,))},
        {"layout": msgspec.structs.replace(layout, groups=(FULL, FULL))},
        # A lease of three blocks that is said to be of four, or of one: the digest fits, the blocks do not.
        {"token_count": 64, "block_count": 4, "prompt_digest": prompt_digest(KV_KEY, longer[:64], whole)},
        {"token_count": 16, "block_count": 1, "prompt_digest": prompt_digest(KV_KEY, fewer, whole)},
    ]
    ferry.offer_all("mis-shaped", [(longer, signed(handle, **change), whole) for change in changes])
    ferry.give_back(lent)


KINDS = {"forged": forged, "stale": stale, "consumed": consumed, "reused": reused, "swapped": swapped}
ROUNDS = {"forged": 12, "stale": 6, "consumed": 20, "reused": 20, "swapped": 24, "mis-shaped": 6}
LEAST, LEAST_OF_A_KIND, LEAST_GENUINE = 1000, 150, 100


@pytest.mark.timeout(300)
def test_none_of_a_thousand_gives_a_wrong_byte() -> None:
    """Six kinds, in random order, against engines that go on serving genuine handles."""
    rng = random.Random(20_25)
    owner = make_engine(limits=LIMITS, blocks=BLOCKS)
    reader = make_engine(limits=LIMITS, blocks=BLOCKS)
    ferry = Ferry(rng, owner, reader)
    rounds = [KINDS.get(kind, mis_shaped) for kind, count in ROUNDS.items() for _ in range(count)]
    rng.shuffle(rounds)
    with running(owner, reader):
        for attempt in rounds:
            attempt(ferry)
            lent = ferry.lend(blocks=rng.randrange(1, 6))
            before = ferry.genuine
            ferry.offer("genuine", lent.prompt, lent.handle)
            assert ferry.genuine == before + 1, f"a genuine handle after {attempt.__name__}: {ferry.reasons}"
    false = {kind: count for kind, count in ferry.attempts.items() if kind != "genuine"}
    print(f"{sum(false.values())} false handles: {false}; outcomes {dict(ferry.reasons)}")
    assert sum(false.values()) >= LEAST
    assert set(false) == set(ROUNDS)
    assert min(false.values()) >= LEAST_OF_A_KIND
    assert ferry.attempts["genuine"] >= LEAST_GENUINE
    assert owner.service.state().leases == 0
