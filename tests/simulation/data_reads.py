"""A transfer back end over simulated data connections: what the tcp back end does, for the real read slots."""

import random
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry_runtime.core.messages import LegKey
from kvferry_runtime.transfer.backends.base import ReadJob, ReadState, ReadStatus
from kvferry_runtime.transfer.checksums import first_damaged
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import LeaseAnswer
from kvferry_wire.data import ReadReply, ReadRequest, ReleaseRequest
from kvferry_wire.limits import Limits
from tests.simulation.fabric import Fabric
from tests.simulation.links import Stream
from tests.simulation.toy_runner import ToyMemory
from tests.simulation.world import Process, Violation

_RELEASE_ANSWER: dict[str, LeaseAnswer] = {"ok": "held", "expired": "expired", "unknown": "unknown"}
_STATUS_REASON = {"expired": RecomputeReason.LEASE_EXPIRED, "unknown": RecomputeReason.LEASE_UNKNOWN}


class Engine(Protocol):
    """What a back end needs of its pod."""

    name: str
    process: Process
    memory: ToyMemory

    def pull_of(self, blocks: tuple[int, ...]) -> LegKey | None:
        """The pull that the core lets write exactly these blocks."""
        ...

    def tenant_of(self, key: LegKey) -> bytes | None: ...

    def reads_moved(self) -> None:
        """A read has progressed or ended."""
        ...


@dataclass(eq=False, slots=True)
class Reading:
    """One read, over a connection of its own."""

    job: ReadJob
    blocks: tuple[int, ...]
    request: str
    stream: Stream | None = None
    asked: int = 0  # blocks asked for
    releasing: bool = False
    arrived: int = 0
    end: ReadStatus | None = None


class SimulatedBackend:
    """See `backends.base.TransferBackend`; only what `ReadSlots` uses."""

    name = "tcp"
    poll_interval_s = 0.1

    def __init__(self, engine: Engine, fabric: Fabric, limits: Limits) -> None:
        self._engine = engine
        self._fabric = fabric
        self._limits = limits
        self._rng: random.Random = engine.process.world.rng(f"reads/{engine.name}/{engine.process.generation}")
        self._by_stream: dict[Stream, Reading] = {}

    def connect(self, incarnation: bytes, host: str, descriptor: bytes) -> str:
        return host

    def read(self, peer: object, job: ReadJob) -> Reading:
        assert isinstance(peer, str)
        key = self._engine.pull_of(job.blocks[0])
        reading = Reading(job, job.blocks[0], "" if key is None else key.internal_id)
        reading.stream = self._fabric.data_stream(self._engine.name, peer, self, reading.request)
        self._by_stream[reading.stream] = reading
        self._ask(reading)
        return reading

    def poll(self, handle: object) -> ReadStatus:
        assert isinstance(handle, Reading)
        nbytes = handle.arrived * self._engine.memory.block_bytes
        return handle.end or ReadStatus(ReadState.RUNNING, nbytes, releasing=handle.releasing)

    def stop(self, handle: object) -> None:
        """The thread that writes into the blocks ends when it gets to it; what arrives before is written."""
        assert isinstance(handle, Reading)
        self._engine.process.soon(0.4 * self._rng.random() ** 2, self._end, handle, RecomputeReason.READ_ERROR)

    def release(self, handle: object) -> None:
        assert isinstance(handle, Reading) and handle.end is not None

    def forget(self, peer: object) -> None:
        """Nothing is kept between reads."""

    def _ask(self, reading: Reading) -> None:
        """The next range of blocks; behind the last one the release, as the tcp back end does."""
        assert reading.stream is not None
        job, lease = reading.job, reading.job.lease
        count = min(self._limits.read_blocks, len(reading.blocks) - reading.asked)
        first, reading.asked = reading.asked, reading.asked + count
        reading.stream.send(
            0, ReadRequest(lease.incarnation, lease.epoch, lease.lease_id, lease.prompt_digest, 0, first, count)
        )
        if reading.asked == len(reading.blocks):
            reading.releasing = True
            reading.stream.send(0, ReleaseRequest(reader=job.reader, id=job.release_id, lease=lease))

    def _all_is_here(self, reading: Reading) -> None:
        """Wait for the answer to the release; the pull asks itself if none comes."""
        self._engine.process.soon(self._limits.control_reply_s / 2, self._end, reading, None)
        self._engine.reads_moved()

    def _end(self, reading: Reading, reason: RecomputeReason | None, answer: LeaseAnswer | None = None) -> None:
        if reading.end is not None:
            return
        nbytes = reading.arrived * self._engine.memory.block_bytes
        done = ReadStatus(ReadState.DONE, nbytes, answer=answer)
        reading.end = done if reason is None else ReadStatus(ReadState.FAILED, nbytes, reason)
        assert reading.stream is not None
        reading.stream.close(0)
        self._fabric.forget(reading.stream)
        del self._by_stream[reading.stream]
        self._engine.reads_moved()

    # ---- the connection

    def on_message(self, stream: Stream, message: Any) -> None:
        reading = self._by_stream.get(stream)
        if reading is None:
            return
        if isinstance(message, ReadReply):
            if reading.arrived == len(reading.blocks):
                self._engine.process.world.count("released_on_the_data_plane")
                self._end(reading, None, _RELEASE_ANSWER[message.status])
            elif message.status != "ok":
                self._end(reading, _STATUS_REASON[message.status])
            return
        index, data = message
        key = self._engine.pull_of(reading.blocks)
        if key is None:
            raise Violation(
                "foreign_write",
                f"a read writes block {reading.blocks[index]}, which is no pull's any more",
                reading.request,
            )
        self._engine.memory.write(reading.blocks[index], self._perhaps_damaged(data), self._engine.tenant_of(key))
        reading.arrived += 1
        sums = reading.job.checksums
        if sums and first_damaged((self._engine.memory.block(0, reading.blocks[index]),), sums[0], index) is not None:
            self._engine.process.world.count("damage_found")
            self._end(reading, RecomputeReason.CHECKSUM)
            return
        if reading.arrived == len(reading.blocks):
            self._all_is_here(reading)
            return
        if reading.arrived == reading.asked:
            self._ask(reading)
        self._engine.reads_moved()

    def _perhaps_damaged(self, data: bytes) -> bytes:
        """A bit flips on the way, now and then."""
        world, damaged = self._engine.process.world, self._fabric.profile.damaged
        if not damaged or world.now >= world.faulty_until or self._rng.random() >= damaged:
            return data
        world.count("blocks_damaged")
        changed = bytearray(data)
        changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def on_close(self, stream: Stream) -> None:
        self.on_cut(stream)

    def on_cut(self, stream: Stream) -> None:
        reading = self._by_stream.get(stream)
        if reading is not None:
            all_is_here = reading.arrived == len(reading.blocks)
            self._end(reading, None if all_is_here else RecomputeReason.READ_ERROR)
