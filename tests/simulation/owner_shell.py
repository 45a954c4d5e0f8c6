"""The owner's side of KV transfer around the real lease table: control messages, the data plane, expiry."""

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from kvferry_runtime.core.messages import GrantLease, LeaseEnded, LeaseTaken
from kvferry_runtime.transfer.checksums import METHOD, block_sums
from kvferry_runtime.transfer.handshake import OwnSide, answer_hello
from kvferry_runtime.transfer.lease import LeaseTable
from kvferry_wire import PROTOCOL_VERSION
from kvferry_wire.control import (
    Answers,
    ControlReply,
    ControlRequest,
    Failed,
    Hello,
    HelloBody,
    LeaseAnswer,
    LeaseRef,
    Release,
    Renew,
)
from kvferry_wire.data import DataRequest, ReadReply, ReleaseRequest
from kvferry_wire.handle import KVHandle
from kvferry_wire.limits import Limits
from tests.simulation.fabric import KEYS, Fabric, layout
from tests.simulation.invariants import check_expiry
from tests.simulation.links import Stream
from tests.simulation.toy_runner import ToyMemory
from tests.simulation.world import Process, Timer, Violation

_TICK_S = 0.05


class Engine(Protocol):
    """What the owner's side needs of its pod."""

    name: str
    process: Process
    incarnation: bytes
    compat_hash: str
    memory: ToyMemory

    def post(self, event: LeaseTaken | LeaseEnded) -> None: ...


@dataclass(slots=True)
class _Requests:
    """Of one connection: those that wait, and how many blocks of the one before them have not left yet."""

    waiting: deque[DataRequest] = field(default_factory=deque)
    blocks_left: int = 0


class OwnerShell:
    """Moves messages to and from the lease table of one engine incarnation."""

    def __init__(self, engine: Engine, fabric: Fabric, limits: Limits, slow_data: float) -> None:
        self._engine = engine
        self._process = engine.process
        self._fabric = fabric
        self._limits = limits
        self._slow_data = slow_data
        self._rng = engine.process.world.rng(f"owner/{engine.name}/{engine.process.generation}")
        self._queues: weakref.WeakKeyDictionary[Stream, _Requests] = weakref.WeakKeyDictionary()
        self._expiry = Timer(self._process, self._judge)
        self.table = LeaseTable(incarnation=engine.incarnation, epoch=1, limits=limits)
        body = HelloBody(incarnation=engine.incarnation, epoch=1, layout=layout(), backends={"tcp": b""})
        self.own = OwnSide(PROTOCOL_VERSION, engine.compat_hash, body)

    # ---- by the engine

    def grant(self, grant: GrantLease) -> KVHandle:
        self.table.grant(grant, self._process.now)
        self._tell()
        handle = KVHandle(
            lease_id=grant.lease_id,
            incarnation=self._engine.incarnation,
            epoch=grant.epoch,
            host=self._engine.name,
            control_port=5600,
            backends={"tcp": b""},
            block_count=len(grant.blocks[0]),
            token_count=grant.token_count,
            compat_hash=self._engine.compat_hash,
            layout=layout(),
            lease_ms=round(self._limits.lease_s * 1000),
            checksum=METHOD if self._fabric.checksums else "",
            checksums=block_sums(self._engine.memory, grant.blocks) if self._fabric.checksums else (),
            prompt_digest=grant.prompt_digest,
        ).signed(KEYS.kv or b"")
        self._fabric.granted.append(handle)
        return handle

    def answered(self, lease_id: int, *, delivered: bool) -> None:
        self.table.answered(lease_id, delivered, self._process.now)
        self._tell()

    def withdraw(self, lease_id: int) -> None:
        self.table.withdraw(lease_id, self._process.now)
        self._tell()

    # ---- by readers

    def on_request(self, request: ControlRequest, reader: str, generation: int) -> None:
        """A control message has arrived; the answer goes back over the connection that it came by."""
        body = request.body
        if isinstance(body, Hello):
            reply = ControlReply(id=request.id, body=answer_hello(body, self.own))
        else:
            before = (self.table.granted, self.table.live(), dict(self.table.ended))
            answers = tuple(self._answer(ref, request) for ref in _leases(body))
            reply = ControlReply(id=request.id, body=Answers(answers=answers))
            self._check_foreign(body, answers, before)
            named = [ref.lease_id for ref in _leases(body)]
            self._process.log("", f"{type(body).__name__} {named} #{request.id}: {answers}")
        self._tell()
        self._fabric.reply(self._engine.name, reader, generation, reply)

    def _answer(self, ref: LeaseRef, request: ControlRequest) -> LeaseAnswer:
        now = self._process.now
        match request.body:
            case Renew():
                return self.table.renew(ref, now)
            case Release():
                return self.table.release(ref, request.reader, request.id, now)
            case _:
                return self.table.failed(ref, now)

    def _check_foreign(
        self, body: Renew | Release | Failed, answers: tuple[LeaseAnswer, ...], before: tuple[int, int, dict[str, int]]
    ) -> None:
        if any(ref.incarnation == self._engine.incarnation for ref in _leases(body)):
            return
        self._process.world.count("messages_for_older_incarnations")
        after = (self.table.granted, self.table.live(), dict(self.table.ended))
        if before != after or set(answers) != {"unknown"}:
            raise Violation("older_incarnation", f"{body!r} was answered {answers}; {before} became {after}")

    # ---- data plane

    def on_message(self, stream: Stream, message: DataRequest) -> None:
        """One request of a connection after another: the next is taken when the last byte for the former has left."""
        requests = self._queues.setdefault(stream, _Requests())
        requests.waiting.append(message)
        self._take_next(stream, requests)

    def _take_next(self, stream: Stream, requests: _Requests) -> None:
        while requests.waiting and not requests.blocks_left:
            self._take(stream, requests.waiting.popleft())

    def _take(self, stream: Stream, message: DataRequest) -> None:
        if isinstance(message, ReleaseRequest):
            answer = self.table.release(message.lease, message.reader, message.id, self._process.now)
            self._process.log("", f"released {message.lease.lease_id} #{message.id} on its connection: {answer}")
            self._tell()
            stream.send(1, ReadReply("ok" if answer == "held" else answer, 0))
            return
        ref = LeaseRef(message.lease_id, message.incarnation, message.epoch, message.prompt_digest)
        found = self.table.lookup(ref)
        if found.answer != "held":
            stream.send(1, ReadReply(found.answer, 0))
            return
        stream.send(1, ReadReply("ok", message.count * self._engine.memory.block_bytes))
        ids = found.blocks[message.group][message.first : message.first + message.count]
        # The bytes leave one block after another, each as it is in memory by then.
        late = 0.0
        for index, block in enumerate(ids, message.first):
            late += self._slow_data * self._rng.random() ** 2
            self._process.soon(late, self._send_block, stream, index, block, ref)
        self._queues[stream].blocks_left = len(ids)

    def _send_block(self, stream: Stream, index: int, block: int, ref: LeaseRef) -> None:
        if self.table.lookup(ref).answer != "held":
            self._process.world.count("blocks_sent_after_their_lease")
        stream.send(1, (index, self._engine.memory.read(block)))
        requests = self._queues[stream]
        requests.blocks_left -= 1
        self._take_next(stream, requests)

    def on_close(self, stream: Stream) -> None:
        """The reader wants no more."""

    def on_cut(self, stream: Stream) -> None:
        """The reader is not heard any more."""

    # ---- by time

    def _judge(self) -> None:
        for ended in self.table.tick(self._process.now):
            if ended.why == "expired":
                check_expiry(self._engine.name, self._engine.incarnation, ended.lease_id, self._fabric)
            self._engine.post(ended)
        self._arm()

    def _arm(self) -> None:
        """The next judgement, a tick later at the earliest."""
        due = self.table.next_expiry()
        self._expiry.set(None if due is None else max(due, self._process.now + _TICK_S))

    def _tell(self) -> None:
        for news in (*self.table.take_taken(), *self.table.take_ended()):
            self._engine.post(news)
        self._arm()


def _leases(body: Renew | Release | Failed) -> tuple[LeaseRef, ...]:
    return body.leases if isinstance(body, Renew) else (body.lease,)
