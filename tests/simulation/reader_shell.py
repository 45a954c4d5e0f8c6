"""The reader's side of KV transfer around the real flows, peer book and read slots: what the pull thread does."""

import itertools
from typing import Protocol

from kvferry_runtime.core.messages import DropLease, HoldLease, LegKey, PullFinished, StartPull
from kvferry_runtime.transfer import flow_messages as flow
from kvferry_runtime.transfer.flow import TransferFlow
from kvferry_runtime.transfer.handshake import INCARNATION, OwnSide, PeerBook, PeerKey, judge_reply
from kvferry_runtime.transfer.reads import Pull, ReadSlots
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import (
    Answers,
    ControlBody,
    ControlReply,
    ControlRequest,
    Failed,
    HelloBody,
    LeaseRef,
    Refuse,
    Release,
    Renew,
)
from kvferry_wire.limits import Limits
from tests.simulation.data_reads import Engine as ReadingEngine
from tests.simulation.data_reads import SimulatedBackend
from tests.simulation.fabric import Fabric
from tests.simulation.world import Timer, Violation

_PEERS_S = 0.25


class Engine(ReadingEngine, Protocol):
    """What the reader's side needs of its pod."""

    incarnation: bytes

    def post(self, event: PullFinished) -> None: ...


class ReaderShell:
    """Drives the pulls of one engine incarnation."""

    def __init__(self, engine: Engine, fabric: Fabric, limits: Limits, own: OwnSide) -> None:
        self._engine = engine
        self._process = engine.process
        self._fabric = fabric
        self._limits = limits
        self._own = own
        self._next_id = itertools.count(1).__next__
        self._peers = PeerBook(next_id=self._next_id, limits=limits)
        backend = SimulatedBackend(engine, fabric, limits)
        self._reads = ReadSlots(
            {"tcp": backend},  # type: ignore[dict-item]  # it has what slots use
            limits.transfers,
            reader=engine.incarnation,
        )
        self._awaited: dict[int, Pull] = {}
        self._timer = Timer(self._process, self.round)
        self.pulls: dict[LegKey, Pull] = {}

    # ---- by the engine

    def command(self, command: HoldLease | StartPull | DropLease) -> None:
        match command:
            case HoldLease():
                self._hold(command)
            case StartPull():
                pull = self.pulls[command.key]
                pull.blocks = command.blocks
                self._feed(pull, flow.BlocksGiven(len(command.blocks[0]) * self._engine.memory.block_bytes))
            case DropLease():
                found = self.pulls.get(command.key)
                if found is not None:
                    self._feed(found, flow.Drop(command.reason))
        self.round()

    def _hold(self, hold: HoldLease) -> None:
        now = self._process.now
        handle = hold.handle
        pull = Pull(
            hold.key,
            handle,
            LeaseRef(handle.lease_id, handle.incarnation, handle.epoch, handle.prompt_digest),
            PeerKey(handle.incarnation, handle.host, handle.control_port),
            TransferFlow(
                lease_s=handle.lease_ms / 1000,
                deadline=now + hold.deadline_s,
                limits=self._limits,
                next_id=self._next_id,
                now=now,
            ),
        )
        if handle not in self._fabric.granted:
            raise Violation("forged_handle", f"{handle} was never granted", hold.key.internal_id)
        if hold.key in self.pulls:
            raise Violation("held_twice", f"the lease of {hold.key} is held already", hold.key.internal_id)
        self.pulls[hold.key] = pull
        for forgotten in self._peers.enter(pull.peer, now):
            self._reads.forget(forgotten)
        self._perform(pull, pull.flow.begin(now))

    # ---- the loop

    def round(self) -> None:
        """Look at reads and at the time, and start what has a place."""
        now = self._process.now
        for pull, event in self._reads.poll(now):
            self._feed(pull, event)
        for pull in tuple(self.pulls.values()):
            if pull.flow.next_wake() <= now:
                self._feed(pull, flow.Tick())
                if pull.flow.next_wake() <= now:
                    raise Violation("busy_wait", f"{pull.flow} is due again at once", pull.key.internal_id)
        while (started := self._reads.start_next(now)) is not None:
            self._feed(*started)
        resend, forgotten = self._peers.tick(now)
        for key, message_id in resend:
            self._send(key, message_id, self._own.hello(), "")
        for key in forgotten:
            self._reads.forget(key)
        wakes = [pull.flow.next_wake() for pull in self.pulls.values()]
        if len(self._peers):
            wakes.append(now + _PEERS_S)
        self._timer.set(min(wakes, default=None))

    def on_reply(self, reply: ControlReply) -> None:
        for ahead, event in self._reads.poll(self._process.now):  # it may answer what came after a release
            self._feed(ahead, event)
        asked = self._peers.asked(reply.id)
        if asked is not None:
            verdict = judge_reply(reply.body, self._own, asked.incarnation)
            for waiter in self._peers.settle(asked, verdict):
                assert isinstance(waiter, Pull)
                self._feed(waiter, _verdict_event(verdict))
        else:
            pull = self._awaited.pop(reply.id, None)
            if pull is not None and isinstance(reply.body, Answers):
                self._feed(pull, flow.Answered(reply.id, reply.body.answers[0]))
        self.round()

    # ---- effects

    def _feed(self, pull: Pull, event: flow.FlowEvent) -> None:
        self._perform(pull, pull.flow.handle(event, self._process.now))

    def _perform(self, pull: Pull, effects: list[flow.FlowEffect]) -> None:
        request = pull.key.internal_id
        for effect in effects:
            match effect:
                case flow.Handshake():
                    self._shake_hands(pull)
                case flow.SendRenew(message_id):
                    self._awaited[message_id] = pull
                    self._send(pull.peer, message_id, Renew(leases=(pull.lease,)), request)
                case flow.SendRelease(message_id):
                    self._awaited[message_id] = pull
                    self._send(pull.peer, message_id, Release(lease=pull.lease), request)
                case flow.SendFailed(message_id, reason):
                    self._send(pull.peer, message_id, Failed(lease=pull.lease, reason=reason), request)
                case flow.Read(release_id):
                    pull.release_id = release_id
                    self._reads.enqueue(pull)
                case flow.StopRead():
                    if not self._reads.stop(pull):
                        self._feed(pull, flow.ReadStopped())
                case flow.Finished():
                    self._finish(pull, effect)
        if pull.flow.ended:
            self._remove(pull)

    def _finish(self, pull: Pull, finished: flow.Finished) -> None:
        self._remove(pull)
        why = "" if finished.reason is None else finished.reason.value
        self._process.log(pull.key.internal_id, f"pull of lease {pull.lease.lease_id} finished: {why or 'valid'}")
        self._process.world.count("transfers" if finished.reason is None else "transfers_failed")
        self._engine.post(PullFinished(key=pull.key, reason=why, seconds=finished.seconds, nbytes=finished.nbytes))

    def _shake_hands(self, pull: Pull) -> None:
        answer = self._peers.ask(pull.peer, pull, self._process.now)
        if isinstance(answer, int):
            self._send(pull.peer, answer, self._own.hello(), pull.key.internal_id)
        elif answer is not None:
            self._feed(pull, _verdict_event(answer))

    def _send(self, peer: PeerKey, message_id: int, body: ControlBody, request: str) -> None:
        message = ControlRequest(reader=self._engine.incarnation, id=message_id, body=body)
        self._fabric.request(self._engine.name, peer.host, self._process.generation, message, request)

    def _remove(self, pull: Pull) -> None:
        if self.pulls.get(pull.key) is not pull:
            return
        del self.pulls[pull.key]
        for message_id in [known for known, owner in self._awaited.items() if owner is pull]:
            del self._awaited[message_id]
        self._peers.leave(pull.peer, pull, self._process.now)


def _verdict_event(verdict: HelloBody | Refuse) -> flow.Welcomed | flow.Refused:
    if isinstance(verdict, HelloBody):
        return flow.Welcomed()
    gone = verdict.field == INCARNATION
    return flow.Refused(RecomputeReason.LEASE_UNKNOWN if gone else RecomputeReason.MISMATCH)
