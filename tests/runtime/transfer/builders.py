"""Builders shared by the tests of this folder."""

import itertools
import queue
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from kvferry_runtime.core.messages import (
    GrantLease,
    HoldLease,
    LeaseEnded,
    LeaseTaken,
    LegKey,
    PullFinished,
    StartPull,
    Submit,
)
from kvferry_runtime.transfer.backends.registry import make_backend
from kvferry_runtime.transfer.config import TransferConfig, TransferPorts
from kvferry_runtime.transfer.flow import TransferFlow
from kvferry_runtime.transfer.lease import LeaseTable
from kvferry_runtime.transfer.memory import ToyBlockMemory
from kvferry_runtime.transfer.service import MakeBackend, TransferService
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.control import LeaseRef
from kvferry_wire.handle import KVHandle
from kvferry_wire.hashing import prompt_digest
from kvferry_wire.keys import ServiceKeys
from kvferry_wire.layout import KVGroup
from kvferry_wire.leg import Sampling
from kvferry_wire.limits import Limits

OWNER = b"owner-incarnation"[:16]
READER = b"reader-incarnation"[:16]
DIGEST = b"d" * 32
EPOCH = 1
KV_KEY = b"k" * 32
KEYS = ServiceKeys(http=b"h" * 32, state=b"s" * 32, hash=b"x" * 32, kv=KV_KEY)
FULL = KVGroup(name="full", layers=2, kv_heads=2, head_dim=8, dtype="float32")
SLIDING = KVGroup(name="sliding", layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")


def make_limits(**changes: float) -> Limits:
    """Short times, so that a test of a real service ends soon."""
    return msgspec.structs.replace(Limits(lease_s=2.0, transfer_floor_s=1.0, control_reply_s=0.5), **changes)


# ---- leases ------------------------------------------------------------------------------------------------------


def make_table(**limits: float) -> LeaseTable:
    return LeaseTable(incarnation=OWNER, epoch=EPOCH, limits=msgspec.structs.replace(Limits(), **limits))


def make_grant(lease_id: int = 1, *, blocks: int = 2, epoch: int = EPOCH, digest: bytes = DIGEST) -> GrantLease:
    return GrantLease(
        key=LegKey("leg", lease_id),
        lease_id=lease_id,
        epoch=epoch,
        prompt_digest=digest,
        blocks=(tuple(range(1, blocks + 1)),),
        token_count=blocks * 16,
    )


def make_ref(lease_id: int = 1, **changes: object) -> LeaseRef:
    ref = LeaseRef(lease_id=lease_id, incarnation=OWNER, epoch=EPOCH, prompt_digest=DIGEST)
    return msgspec.structs.replace(ref, **changes)


# ---- flows -------------------------------------------------------------------------------------------------------


def make_flow(*, lease_s: float = 15.0, deadline: float = 600.0, now: float = 0.0, **limits: float) -> TransferFlow:
    """It renews at once, unless `first_renew_s` says otherwise."""
    return TransferFlow(
        lease_s=lease_s,
        deadline=deadline,
        limits=msgspec.structs.replace(Limits(first_renew_s=0.0), **limits),
        next_id=itertools.count(1).__next__,
        now=now,
    )


# ---- services ----------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """A transfer service with its memory and what it posted; `taken`: leases that a reader took up."""

    service: TransferService
    memory: ToyBlockMemory
    config: TransferConfig
    ports: TransferPorts
    inbox: "queue.Queue[PullFinished | LeaseEnded]"
    lease_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    leg_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    taken: list[int] = field(default_factory=list)

    def grant(self, blocks: tuple[tuple[int, ...], ...], prompt: tuple[int, ...], *, answered: bool = True) -> KVHandle:
        """Lease blocks out for a prompt."""
        lease_id = next(self.lease_ids)
        handle = self.service.grant(
            GrantLease(
                key=LegKey("prefill", lease_id),
                lease_id=lease_id,
                epoch=self.config.epoch,
                prompt_digest=prompt_digest(KV_KEY, prompt, KeyExtras()),
                blocks=blocks,
                token_count=len(prompt),
            )
        )
        if answered:
            self.service.answered(lease_id, True)
        return handle

    def start_pull(self, handle: KVHandle, blocks: tuple[tuple[int, ...], ...], *, deadline_s: float = 20.0) -> LegKey:
        """Hold and pull at once."""
        key = LegKey("decode", next(self.leg_ids))
        self.service.hold(HoldLease(key=key, handle=handle, deadline_s=deadline_s))
        self.service.pull(StartPull(key=key, handle=handle, blocks=blocks, deadline_s=deadline_s))
        return key

    def pull(self, handle: KVHandle, blocks: tuple[tuple[int, ...], ...], *, deadline_s: float = 20.0) -> PullFinished:
        """Hold, pull, and wait for the end."""
        key = self.start_pull(handle, blocks, deadline_s=deadline_s)
        finished = self.next_post()
        assert isinstance(finished, PullFinished) and finished.key == key
        return finished

    def next_post(self, timeout: float = 15.0) -> PullFinished | LeaseEnded:
        return self.inbox.get(timeout=timeout)

    def bytes_of(self, group: int, ids: tuple[int, ...]) -> list[bytes]:
        return [bytes(self.memory.block(group, block_id)) for block_id in ids]


def make_engine(
    *,
    limits: Limits | None = None,
    groups: tuple[KVGroup, ...] = (FULL,),
    blocks: int = 64,
    keys: ServiceKeys = KEYS,
    make: MakeBackend = make_backend,
    backends: tuple[str, ...] = ("tcp",),
    compat_hash: str = "compat",
    control_port: int = 0,
    data_port: int = 0,
    fill: bool = False,
    checksums: bool = True,
) -> Engine:
    """A started service; `fill` puts random bytes into its blocks."""
    memory = ToyBlockMemory(groups, 16, blocks)
    if fill:
        for group, shape in enumerate(groups):
            for block_id in range(1, blocks):
                memory.block(group, block_id)[:] = secrets.token_bytes(shape.block_bytes(16))
    inbox: queue.Queue[PullFinished | LeaseEnded] = queue.Queue()
    config = TransferConfig(
        incarnation=secrets.token_bytes(16),
        epoch=EPOCH,
        compat_hash=compat_hash,
        layout=memory.layout(),
        limits=limits or make_limits(),
        backends=backends,
        control_port=control_port,
        data_port=data_port,
        checksums=checksums,
    )
    taken: list[int] = []

    def post(event: PullFinished | LeaseTaken | LeaseEnded) -> None:
        if isinstance(event, LeaseTaken):
            taken.append(event.lease_id)
        else:
            inbox.put(event)

    service = TransferService(config=config, keys=keys, memory=memory, post=post, make=make)
    return Engine(service, memory, config, service.start(), inbox, taken=taken)


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """Close the engines and check their books at the end."""
    try:
        yield
        for engine in engines:
            engine.service.check_integrity()
    finally:
        for engine in engines:
            engine.service.close(5.0)


def wait_until(condition: Callable[[], bool], timeout: float = 5.0) -> bool:
    """Whether a condition of a real service came true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True


def make_submit(prompt: tuple[int, ...], handle: KVHandle | None, **changes: object) -> Submit:
    submit = Submit(
        key=LegKey("leg", 0),
        kind="generate",
        prompt_ids=prompt,
        emitted=((),),
        sampling=Sampling(seed=0, max_tokens=4),
        extras=KeyExtras(),
        deadline_s=10.0,
        eos_token_ids=(),
        handle=handle,
    )
    return msgspec.structs.replace(submit, **changes)
