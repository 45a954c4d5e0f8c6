"""The reader's side: drives all pulls of an engine, and renews their leases whatever the engine's own thread does.

Whoever brings news takes them on: the engine with a command, a back end that has moved on, the reader's own thread with
replies and time. One works at a time, under `_lock`; who finds it taken leaves its news and wakes the reader's thread.
So a pull that meets nothing unusual goes from the engine to the back end and back without another thread in between.
The control sockets are the reader's thread's alone: others leave their messages in `_outbox`. What is decided is in
`flow` and `handshake`.
"""

import itertools
import logging
import math
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import zmq

from kvferry_runtime.core.messages import DropLease, HoldLease, LegKey, PullFinished, StartPull
from kvferry_runtime.transfer.backends.base import TransferBackend
from kvferry_runtime.transfer.config import PullCounters
from kvferry_runtime.transfer.flow import WITHOUT_BLOCKS, TransferFlow
from kvferry_runtime.transfer.flow_messages import (
    Answered,
    BlocksGiven,
    Drop,
    Finished,
    FlowEffect,
    FlowEvent,
    Handshake,
    Read,
    ReadStopped,
    Refused,
    SendFailed,
    SendRelease,
    SendRenew,
    StopRead,
    Tick,
    Welcomed,
)
from kvferry_runtime.transfer.handshake import INCARNATION, OwnSide, PeerBook, PeerKey, PeersFullError, judge_reply
from kvferry_runtime.transfer.peer_sockets import PeerSockets
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
    decode_reply,
    encode,
)
from kvferry_wire.limits import Limits

_log = logging.getLogger(__name__)

_IDLE_S = 0.25  # a wait without anything due

Command = HoldLease | StartPull | DropLease


class ReaderControl:
    """Drives the pulls of one engine.

    Args:
        backends: available ones, by name, in order of preference.
        block_bytes: of a block of each KV group.
        post: thread-safe; hears of each pull once, after the last write into its blocks. It is called under the lock,
            perhaps by the very thread that gives a command: it must not wait.
    """

    def __init__(
        self,
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
        kv_key: bytes,
        own: Callable[[], OwnSide],
        backends: Mapping[str, TransferBackend],
        block_bytes: tuple[int, ...],
        limits: Limits,
        post: Callable[[PullFinished], None],
    ) -> None:
        self._own = own
        self._incarnation = own().body.incarnation
        self._block_bytes = block_bytes
        self._limits = limits
        self._post = post
        self._next_id = itertools.count(1).__next__
        self._pulls: dict[LegKey, Pull] = {}
        self._awaited: dict[int, Pull] = {}  # by message id: renewals and releases
        self._reads = ReadSlots(backends, limits.transfers, reader=self._incarnation)
        self._peers = PeerBook(next_id=self._next_id, limits=limits)
        self._sockets = PeerSockets(context, kv_key, limits)
        self._outbox: deque[tuple[PeerKey, bytes | None]] = deque()  # None: close the peer's socket
        self._sleeps_until = math.inf  # when the reader's thread looks at the pulls next, of itself
        self._due = math.inf  # when the first of those wants it that were moved since it last looked
        self._peers_due = 0.0
        self.counters = PullCounters()
        self._lock = threading.Lock()  # guards all above but the sockets
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._sockets.watch(self._wake_receiver.fileno())
        self._closing = threading.Event()
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name="kv-control-reader", daemon=True)

    # ---- from any thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Work from now on."""
        self._thread.start()

    def command(self, command: Command) -> None:
        """Take over an effect of the engine's core."""
        self._commands.put(command)
        self.attend()

    def attend(self) -> None:
        """Look at commands and reads now: here, unless a thread is at it already. Never waits, never raises."""
        if self._lock.acquire(blocking=False):
            try:
                if not (self._closing.is_set() or self.failure or self._take_news()):
                    return
            except Exception as error:  # noqa: BLE001 - kept, as that of the reader's thread
                self._fail(error)
            finally:
                self._lock.release()
        self._wake()

    def close(self, timeout: float) -> bool:
        """Cancel all pulls; each is posted as finished before this returns. False if `timeout` passes."""
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        else:
            self._sockets.close()
        if self._thread.is_alive():
            return False
        with self._lock:  # a read's thread may have found the reader alive a moment ago
            while not self._commands.empty():  # came after the last round
                command = self._commands.get_nowait()
                if isinstance(command, StartPull):
                    self._post(PullFinished(key=command.key, reason=RecomputeReason.CANCELLED.value))
        self._wake_sender.close()
        self._wake_receiver.close()
        return True

    def holds_and_pulls(self) -> tuple[int, int, int]:
        """Legs without blocks, legs with blocks, and those that a back end works on."""
        pulls = tuple(self._pulls.copy().values())
        holds = sum(pull.flow.state in WITHOUT_BLOCKS for pull in pulls)
        return holds, len(pulls) - holds, len(self._reads)

    def peers(self) -> tuple[int, int]:
        """Known peers, and handshakes begun."""
        return len(self._peers), self._peers.handshakes

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            wait_s: float | None = 0.0
            while wait_s is not None:
                self._sockets.poll(wait_s)
                wait_s = self._round()
        except Exception as error:  # noqa: BLE001 - kept, and raised by `check_alive`
            self._fail(error)
        finally:
            self._sockets.close()

    def _round(self) -> float | None:
        """Seconds until the next one is due; ``None`` if there will be none."""
        self._drain_wakes()
        # In this order: an answer that is here may be of after a release, which a read's thread sent before it came.
        heard_at = time.monotonic()
        replies = list(self._sockets.receive())
        with self._lock:
            if self.failure:
                return None
            try:
                self._take_all(replies, heard_at)
            except Exception as error:  # noqa: BLE001 - kept, and no other thread goes on with half of it
                self._fail(error)
                return None
            now = time.monotonic()
            wait_s = self._wait_s(now)
            self._sleeps_until, self._due = now + wait_s, math.inf
            leaving, self._outbox = self._outbox, deque()
            over = self._closing.is_set() and not self._pulls
        for peer, message in leaving:
            if message is None:
                self._sockets.forget(peer)
            else:
                self._sockets.send(peer, message)
        return None if over else wait_s

    def _take_all(self, replies: list[bytes], heard_at: float) -> None:
        """What the reader's thread does. It judges by the time at which it had not heard `replies` yet."""
        self._take_reads()
        for data in replies:
            self._on_reply(data)
        self._take_commands()
        if self._closing.is_set():
            for pull in tuple(self._pulls.values()):
                self._feed(pull, Drop("closing"))
        for pull in tuple(self._pulls.values()):
            if pull.flow.next_wake() <= heard_at:
                self._perform(pull, pull.flow.handle(Tick(), heard_at))
        if heard_at >= self._peers_due:
            self._peers_due = heard_at + _IDLE_S
            self._tend_peers(heard_at)
        self._start_reads()

    def _take_news(self) -> bool:
        """What any thread may do. Whether the reader's own has something to do sooner than it knows of."""
        self._take_reads()
        self._take_commands()
        self._start_reads()
        return bool(self._outbox) or min(self._due, self._reads.next_poll()) < self._sleeps_until

    def _take_reads(self) -> None:
        for pull, event in self._reads.poll(time.monotonic()):
            self._feed(pull, event)

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._on_command(self._commands.get_nowait())

    def _start_reads(self) -> None:
        while (started := self._reads.start_next(time.monotonic())) is not None:
            self._feed(*started)

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or f"{type(error).__name__}: {error}"
        _log.error("the pulls cannot go on", exc_info=error)

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"x")
        except BlockingIOError:
            pass  # as many wake-ups are pending as the pipe holds
        except OSError:
            pass  # closed: nothing is left to wake

    def _wait_s(self, now: float) -> float:
        due = min((pull.flow.next_wake() for pull in self._pulls.values()), default=now + _IDLE_S)
        return max(0.0, min(due - now, self._reads.next_poll() - now, _IDLE_S))

    def _drain_wakes(self) -> None:
        try:
            while len(self._wake_receiver.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass  # woken by a reply or by time

    # ---- commands ------------------------------------------------------------------------------------------------

    def _on_command(self, command: Command) -> None:
        match command:
            case HoldLease():
                self._hold(command)
            case StartPull():
                self._start_pull(command)
            case DropLease():
                pull = self._pulls.get(command.key)
                if pull is not None:  # else it has finished meanwhile, which was posted
                    self._feed(pull, Drop(command.reason))

    def _hold(self, hold: HoldLease) -> None:
        if hold.key in self._pulls:
            raise ValueError(f"hold: the lease of {hold.key} is held already")
        now = time.monotonic()
        handle = hold.handle
        flow = TransferFlow(
            lease_s=handle.lease_ms / 1000,
            deadline=now + hold.deadline_s,
            limits=self._limits,
            next_id=self._next_id,
            now=now,
        )
        lease = LeaseRef(handle.lease_id, handle.incarnation, handle.epoch, handle.prompt_digest)
        peer = PeerKey(handle.incarnation, handle.host, handle.control_port)
        pull = Pull(hold.key, handle, lease, peer, flow)
        self._pulls[hold.key] = pull
        try:
            if len(self._pulls) > self._limits.pulls:
                raise PeersFullError(f"pulls: at most {self._limits.pulls} are accepted")
            for forgotten in self._peers.enter(peer, now):
                self._forget(forgotten)
        except PeersFullError as error:
            _log.warning("the lease of a leg is not held: %s", error)
            pull.peer = _NOBODY
            self._perform(pull, flow.handle(Refused(RecomputeReason.CONNECT), now))
            return
        self._perform(pull, flow.begin(now))

    def _start_pull(self, start: StartPull) -> None:
        if start.key not in self._pulls:
            self._hold(HoldLease(key=start.key, handle=start.handle, deadline_s=start.deadline_s))
        pull = self._pulls[start.key]
        pull.blocks = start.blocks
        lengths = {len(group) for group in start.blocks}
        if len(start.blocks) != len(self._block_bytes) or lengths != {start.handle.block_count}:
            self._feed(pull, Refused(RecomputeReason.HANDLE))
        nbytes = sum(len(ids) * size for ids, size in zip(start.blocks, self._block_bytes, strict=False))
        self._feed(pull, BlocksGiven(nbytes))

    # ---- effects -------------------------------------------------------------------------------------------------

    def _feed(self, pull: Pull, event: FlowEvent) -> None:
        self._perform(pull, pull.flow.handle(event, time.monotonic()))

    def _perform(self, pull: Pull, effects: list[FlowEffect]) -> None:
        for effect in effects:
            match effect:
                case Handshake():
                    self._shake_hands(pull)
                case SendRenew(message_id):
                    self._awaited[message_id] = pull
                    self._send(pull.peer, message_id, Renew(leases=(pull.lease,)))
                case SendRelease(message_id):
                    self._awaited[message_id] = pull
                    self._send(pull.peer, message_id, Release(lease=pull.lease))
                case SendFailed(message_id, reason):
                    self._send(pull.peer, message_id, Failed(lease=pull.lease, reason=reason[:64]))
                case Read(release_id):
                    pull.release_id = release_id
                    self._reads.enqueue(pull)
                case StopRead():
                    if not self._reads.stop(pull):
                        self._feed(pull, ReadStopped())
                case Finished():
                    self._finish(pull, effect)
        if pull.flow.ended:
            self._remove(pull)
        else:
            self._due = min(self._due, pull.flow.next_wake())

    def _shake_hands(self, pull: Pull) -> None:
        answer = self._peers.ask(pull.peer, pull, time.monotonic())
        if isinstance(answer, int):
            self._send(pull.peer, answer, self._own().hello())
        elif answer is not None:
            self._feed(pull, _verdict_event(answer))

    def _send(self, peer: PeerKey, message_id: int, body: ControlBody) -> None:
        if peer is _NOBODY:
            return
        request = ControlRequest(reader=self._incarnation, id=message_id, body=body)
        self._outbox.append((peer, encode(request)))

    def _finish(self, pull: Pull, finished: Finished) -> None:
        self._remove(pull)  # before it is told: whoever hears of it may count the pulls that are left
        counters = self.counters
        if finished.reason is None:
            counters.ok += 1
            counters.nbytes += finished.nbytes
            counters.seconds += finished.seconds
        else:
            counters.failed[finished.reason.value] = counters.failed.get(finished.reason.value, 0) + 1
        self._post(
            PullFinished(
                key=pull.key,
                reason="" if finished.reason is None else finished.reason.value,
                seconds=finished.seconds,
                nbytes=finished.nbytes,
            )
        )

    def _remove(self, pull: Pull) -> None:
        if self._pulls.get(pull.key) is not pull:
            return
        del self._pulls[pull.key]
        for message_id in [known for known, owner in self._awaited.items() if owner is pull]:
            del self._awaited[message_id]
        if pull.peer is not _NOBODY:
            self._peers.leave(pull.peer, pull, time.monotonic())

    # ---- replies and peers ---------------------------------------------------------------------------------------

    def _on_reply(self, data: bytes) -> None:
        try:
            reply: ControlReply = decode_reply(data)
        except msgspec.DecodeError as error:
            _log.warning("control reply dropped: %s", error)
            return
        asked = self._peers.asked(reply.id)
        if asked is not None:
            verdict = judge_reply(reply.body, self._own(), asked.incarnation)
            self._settle(asked, verdict)
            return
        pull = self._awaited.pop(reply.id, None)
        if pull is None or not isinstance(reply.body, Answers) or len(reply.body.answers) != 1:
            return  # late: its flow has gone on; or the answer to a `Failed`, which nobody waits for
        self._feed(pull, Answered(reply.id, reply.body.answers[0]))

    def _settle(self, key: PeerKey, verdict: HelloBody | Refuse) -> None:
        if isinstance(verdict, Refuse):
            _log.warning(
                "peer %s refused: %s is %s here and %s there",
                key.incarnation.hex(),
                verdict.field,
                verdict.ours,
                verdict.theirs,
            )
        for waiter in self._peers.settle(key, verdict):
            assert isinstance(waiter, Pull)
            self._feed(waiter, _verdict_event(verdict))

    def _tend_peers(self, now: float) -> None:
        resend, forgotten = self._peers.tick(now)
        for key, message_id in resend:
            self._send(key, message_id, self._own().hello())
        for key in forgotten:
            self._forget(key)

    def _forget(self, key: PeerKey) -> None:
        self._outbox.append((key, None))
        self._reads.forget(key)


# A pull that found no place among the peers: nothing is sent for it.
_NOBODY = PeerKey(b"", "", 0)


def _verdict_event(verdict: HelloBody | Refuse) -> Welcomed | Refused:
    if isinstance(verdict, HelloBody):
        return Welcomed()
    # Another incarnation at the address: the one that granted the lease is gone, and its leases with it.
    gone = verdict.field == INCARNATION
    return Refused(RecomputeReason.LEASE_UNKNOWN if gone else RecomputeReason.MISMATCH)
