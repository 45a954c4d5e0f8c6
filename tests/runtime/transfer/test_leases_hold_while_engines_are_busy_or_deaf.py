"""Real services under what engines and networks do: work that keeps the interpreter, one-way silence, late writers."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from kvferry_runtime.core.messages import DropLease, HoldLease, LeaseEnded, LegKey, PullFinished, StartPull
from kvferry_runtime.transfer.backends.base import BackendContext, ReadJob, ReadState, ReadStatus
from kvferry_runtime.transfer.backends.tcp import TcpBackend
from kvferry_runtime.transfer.reasons import RecomputeReason
from tests.runtime.transfer.builders import KV_KEY, Engine, make_engine, make_limits, running, wait_until
from tests.runtime.transfer.slow_paths import Proxy

PROMPT = tuple(range(16))


@contextmanager
def busy_engine() -> Iterator[None]:
    """Another thread of this process computes in Python without a pause, as a long step may."""
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            sum(range(20_000))

    thread = threading.Thread(target=burn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5.0)


def ends(engine: Engine, count: int, within: float) -> list[LeaseEnded]:
    deadline = time.monotonic() + within
    found = []
    while len(found) < count:
        posted = engine.next_post(max(0.01, deadline - time.monotonic()))
        assert isinstance(posted, LeaseEnded)
        found.append(posted)
    return found


def test_one_leg_waits_ten_lease_times_while_99_silent_leases_end() -> None:
    """R022's numbers, both engines computing meanwhile: none of the silent ones stays, the waiter's never expires."""
    lease_s = 0.6
    limits = make_limits(lease_s=lease_s)
    owner, reader = make_engine(fill=True, limits=limits), make_engine(limits=limits)
    with running(owner, reader), busy_engine():
        waits = owner.grant(((1,),), PROMPT)
        key = LegKey("waits", 0)
        reader.service.hold(HoldLease(key=key, handle=waits, deadline_s=60.0))
        assert wait_until(lambda: owner.taken == [waits.lease_id])
        silent = [owner.grant(((block,),), PROMPT).lease_id for block in range(2, 62)]
        silent += [owner.grant(((block,),), PROMPT).lease_id for block in range(2, 41)]
        assert len(silent) == 99
        found = ends(owner, 99, within=lease_s + 1.5)
        assert {(end.lease_id, end.why) for end in found} == {(lease_id, "expired") for lease_id in silent}
        time.sleep(10 * lease_s)
        assert owner.inbox.empty()
        reader.service.pull(StartPull(key=key, handle=waits, blocks=((9,),), deadline_s=20.0))
        assert reader.next_post() == PullFinished(key=key, seconds=pytest.approx(0, abs=20), nbytes=2048 * 2)
        assert ends(owner, 1, within=2.0)[0].why == "released"


def test_a_dead_reader_frees_what_it_held_within_a_lease() -> None:
    """Twenty legs wait at a reader that stops without a word: all their leases end, and new ones are granted."""
    limits = make_limits(lease_s=0.6)
    owner, reader = make_engine(limits=limits), make_engine(limits=limits)
    with running(owner):
        handles = [owner.grant(((block,),), PROMPT) for block in range(1, 21)]
        with Proxy(owner.ports.control) as proxy:
            for number, handle in enumerate(handles):
                heard = msgspec.structs.replace(handle, control_port=proxy.port).signed(KV_KEY)
                reader.service.hold(HoldLease(key=LegKey("held", number), handle=heard, deadline_s=60.0))
            assert wait_until(lambda: len(owner.taken) == 20)
            proxy.cut()
            assert {end.why for end in ends(owner, 20, within=0.6 + 1.0)} == {"expired"}
        assert owner.service.state().leases == 0
        reader.service.close(5.0)


def test_a_reader_that_is_not_heard_reads_no_expired_block() -> None:
    """One direction is silent for longer than a lease, then heals: the owner frees, the leg recomputes (R007)."""
    limits = make_limits(lease_s=0.8)
    owner, reader = make_engine(fill=True, limits=limits), make_engine(limits=limits)
    with running(owner, reader), Proxy(owner.ports.control) as proxy:
        handle = msgspec.structs.replace(owner.grant(((1, 2),), PROMPT * 2), control_port=proxy.port).signed(KV_KEY)
        key = LegKey("queued", 0)
        reader.service.hold(HoldLease(key=key, handle=handle, deadline_s=60.0))
        assert wait_until(lambda: owner.taken == [handle.lease_id])
        proxy.deaf = True
        assert ends(owner, 1, within=0.8 + 1.0)[0].why == "expired"
        owner.memory.block(0, 1)[:] = b"\xee" * owner.memory.block(0, 1).nbytes  # given to others
        proxy.deaf = False
        reader.service.pull(StartPull(key=key, handle=handle, blocks=((5, 6),), deadline_s=20.0))
        finished = reader.next_post()
        assert isinstance(finished, PullFinished)
        assert finished.reason in {"peer_dead", "lease_expired"}
        assert reader.bytes_of(0, (5, 6)) == [bytes(block.nbytes) for block in (reader.memory.block(0, 5),) * 2]
        # Healed, the same pair ferries again at once, with no new handshake.
        again = msgspec.structs.replace(owner.grant(((3,),), PROMPT), control_port=proxy.port).signed(KV_KEY)
        assert reader.pull(again, ((7,),)).reason == ""
        assert reader.service.state().handshakes == 1


@dataclass(eq=False)
class LateWriter(TcpBackend):
    """A back end whose writer goes on for a while after it was told to stop, as a NIC may."""

    context: BackendContext
    late_s: float = 1.5
    writing: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.context)

    def read(self, peer: object, job: ReadJob) -> object:
        read = LateRead(job)
        thread = threading.Thread(target=self._write, args=(read,), daemon=True)
        self.writing.append(thread)
        thread.start()
        return read

    def _write(self, read: "LateRead") -> None:
        block = self._memory.block(0, read.job.blocks[0][0])
        while time.monotonic() < read.stops_at:
            block[0] = (block[0] + 1) % 256
            read.wrote_at = time.monotonic()
            time.sleep(0.005)
        read.end = ReadStatus(ReadState.FAILED, 0, RecomputeReason.READ_ERROR, "stopped")
        self.context.wake()

    def poll(self, handle: object) -> ReadStatus:
        assert isinstance(handle, LateRead)
        return handle.end or ReadStatus(ReadState.RUNNING, 0)

    def stop(self, handle: object) -> None:
        assert isinstance(handle, LateRead)
        handle.stops_at = min(handle.stops_at, time.monotonic() + self.late_s)

    def release(self, handle: object) -> None:
        """Nothing is kept."""


@dataclass(eq=False)
class LateRead:
    job: ReadJob
    stops_at: float = float("inf")
    wrote_at: float = 0.0
    end: ReadStatus | None = None


def test_a_dropped_pull_is_finished_only_after_its_last_write() -> None:
    """The owner hears of it at once; the engine gets its blocks back when nothing writes into them any more (R023)."""
    made: list[LateWriter] = []

    def make(name: str, context: BackendContext) -> LateWriter:
        made.append(LateWriter(context))
        return made[-1]

    owner, reader = make_engine(fill=True), make_engine(make=make)
    with running(owner, reader):
        handle = owner.grant(((1,),), PROMPT)
        key = reader.start_pull(handle, ((5,),))
        block = reader.memory.block(0, 5)
        assert wait_until(lambda: block[0] > 3)
        began = time.monotonic()
        reader.service.drop(DropLease(key=key, reason="client left"))
        assert ends(owner, 1, within=1.0)[0].why == "failed"
        assert reader.inbox.empty()
        finished = reader.next_post(5.0)
        assert finished.key == key and finished.reason == "cancelled"
        assert time.monotonic() - began >= made[0].late_s
        after = block[0]
        time.sleep(0.1)
        assert block[0] == after
        assert not any(thread.is_alive() for thread in made[0].writing)
