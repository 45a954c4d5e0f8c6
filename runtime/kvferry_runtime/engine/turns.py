"""The EngineCore's loop: inbox -> core -> model -> effects. One thread; the order of a turn is the order below."""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.messages import (
    AbortLeg,
    Drain,
    DropLease,
    EngineEffect,
    EngineOutput,
    FailOut,
    GrantLease,
    HandedOver,
    HoldLease,
    LeaseEnded,
    LeaseSettled,
    LeaseTaken,
    LegKey,
    Posted,
    PrefilledOut,
    StartPull,
    Submit,
    TokensOut,
)
from kvferry_runtime.core.plan import StepPlan, StepResult
from kvferry_runtime.engine.messages import (
    HEARTBEAT_S,
    Batch,
    Downward,
    EngineStats,
    Heartbeat,
    PrefillAnswered,
    ResetPrefixCache,
    SnapshotReply,
    SnapshotRequest,
    Stop,
    Upward,
)
from kvferry_runtime.engine.state_stream import StateNumbers, StatePublisher
from kvferry_runtime.transfer.config import TransferState
from kvferry_service import logs
from kvferry_wire import state
from kvferry_wire.handle import KVHandle
from kvferry_wire.state import Load

_TICK_S = 0.25  # an idle loop turns at least this often
_QUIET_S = 0.01  # without a message or a step, before an engine that has become idle checks its books
_UNCHECKED_S = 1.0  # from a step to the check, and between two checks, where it is never quiet
_MOST_UNCHECKED_S = 10.0  # between two checks, where there are steps, too: from then on any idle turn will do

_log = logs.get_logger(__name__)


class Runner(Protocol):
    """``exec.runner.ModelRunner``."""

    def step(self, plan: StepPlan) -> StepResult: ...


class Transfer(Protocol):
    """``transfer.service.TransferService``, as the loop uses it."""

    def check(self, submit: Submit) -> str: ...
    def grant(self, grant: GrantLease) -> KVHandle: ...
    def answered(self, lease_id: int, delivered: bool) -> None: ...
    def withdraw(self, lease_id: int) -> bool: ...
    def hold(self, effect: HoldLease) -> None: ...
    def pull(self, effect: StartPull) -> None: ...
    def drop(self, effect: DropLease) -> None: ...
    def state(self) -> TransferState: ...
    def check_alive(self) -> None: ...
    def check_integrity(self) -> None: ...


class Wire(Protocol):
    """``engine.link.Link``, as the loop uses it."""

    def inbox(self) -> list[Downward | Posted]: ...
    def wait(self, timeout_s: float) -> None: ...
    def wake(self) -> None: ...
    def send(self, message: Upward) -> None: ...


class EngineLoop:
    """Turns until told to stop. Whatever is raised in a turn is the end of the process: nothing is repaired here."""

    def __init__(
        self,
        *,
        core: EngineCore,
        runner: Runner,
        transfer: Transfer | None,
        link: Wire,
        numbers: StateNumbers,
        publisher: StatePublisher | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._runner = runner
        self._transfer = transfer
        self._link = link
        self._numbers = numbers
        self._publisher = publisher
        self._clock = clock
        self._stopping = False
        self._ticks = 0
        self._steps = 0
        self._step_tokens = 0
        self._step_seconds = 0.0
        self._kv_events = 0
        self._heartbeat_at = -HEARTBEAT_S
        self._draining = False
        self._told: Load | None = None  # by the last heartbeat
        self._unchecked = False  # something has happened since the books were checked last
        self._active_at = -_QUIET_S  # a message was heard, or a step computed
        self._checked_at = clock()
        self._due_at = 0.0  # when the next check comes though it is not quiet
        self._outputs: list[EngineOutput] = []
        self._handles: dict[LegKey, KVHandle] = {}  # of grants whose output follows in the same effects
        self._leases: dict[LegKey, int] = {}  # live ones, by the leg that they were granted to
        self._leased_to: dict[int, LegKey] = {}

    def stop(self) -> None:
        """From any thread: end after the current turn."""
        self._stopping = True
        self._link.wake()

    def run(self) -> None:
        """Turn until ``stop`` or a ``Stop`` message."""
        while not self._stopping:
            if not self._turn():
                self._link.wait(self._wait_s())
        if self._core.idle():
            self._check_books()

    def _turn(self) -> bool:
        """One turn; returns whether a step was computed."""
        heard = self._link.inbox()
        for message in heard:
            self._take(message)
        self._route(self._core.expire(self._clock()))
        plan, effects = self._core.schedule(self._clock())
        self._route(effects)
        if plan is not None:
            self._route(self._core.commit(plan, self._compute(plan), self._clock()))
        self._ticks += 1
        if self._outputs:
            self._link.send(Batch(ticks=self._ticks, outputs=tuple(self._outputs)))
            self._outputs.clear()
        self._publish()
        self._beat()
        self._check_when_quiet(heard=bool(heard), worked=plan is not None)
        return plan is not None

    def _compute(self, plan: StepPlan) -> StepResult:
        started = self._clock()
        result = self._runner.step(plan)
        self._steps += 1
        self._step_tokens += plan.tokens
        self._step_seconds += self._clock() - started
        return result

    # ---- in

    def _take(self, message: Downward | Posted) -> None:
        match message:
            case SnapshotRequest():
                self._publish()
                snapshot = self._numbers.snapshot(self._core.snapshot_hashes(), self._core.load())
                self._link.send(SnapshotReply(number=message.number, snapshot=state.encode(snapshot)))
            case PrefillAnswered():
                if self._transfer is not None:
                    self._transfer.answered(message.lease_id, message.delivered)
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
            case Stop():
                self._stopping = True
            case Drain():
                self._draining = True
                self._route(self._core.handle(message, self._clock()))
            case Submit():
                self._route(self._core.handle(self._checked(message), self._clock()))
            case AbortLeg():
                self._withdraw(message.key)
                self._route(self._core.handle(message, self._clock()))
            case LeaseTaken():
                if (key := self._leased_to.get(message.lease_id)) is not None:  # else it has ended since
                    self._outputs.append(LeaseSettled(key=key))
            case LeaseEnded():
                if (key := self._leased_to.pop(message.lease_id, None)) is not None:
                    del self._leases[key]
                    self._outputs.append(LeaseSettled(key=key))
                self._route(self._core.handle(message, self._clock()))
            case _:
                self._route(self._core.handle(message, self._clock()))

    def _withdraw(self, key: LegKey) -> None:
        """The leg that is aborted may have ended already, in an answer that nobody got or that is of no use now."""
        lease_id = self._leases.get(key)
        if lease_id is not None:
            self._needed().withdraw(lease_id)

    def _checked(self, submit: Submit) -> Submit:
        """The core never sees a handle that is not genuine, of this prompt and of this layout."""
        if submit.handle is None:
            return submit
        reason = "no_backend" if self._transfer is None else self._transfer.check(submit)
        if not reason:
            return submit
        return msgspec.structs.replace(submit, handle=None, recompute=reason)

    # ---- out

    def _route(self, effects: list[EngineEffect]) -> None:
        for effect in effects:
            match effect:
                case TokensOut() | FailOut():
                    self._outputs.append(effect)
                case PrefilledOut() | HandedOver():
                    handle = self._handles.pop(effect.key, None)
                    self._outputs.append(msgspec.structs.replace(effect, handle=handle))
                case GrantLease():
                    self._grant(effect)
                case HoldLease():
                    self._needed().hold(effect)
                case StartPull():
                    self._needed().pull(effect)
                case DropLease():
                    self._needed().drop(effect)

    def _grant(self, grant: GrantLease) -> None:
        if self._transfer is None:
            # No peer can read it: the blocks go back at once and decode computes the prompt itself.
            self._route(self._core.handle(LeaseEnded(lease_id=grant.lease_id, why="withdrawn"), self._clock()))
            return
        self._handles[grant.key] = self._transfer.grant(grant)
        self._leases[grant.key] = grant.lease_id
        self._leased_to[grant.lease_id] = grant.key

    def _needed(self) -> Transfer:
        if self._transfer is None:
            raise AssertionError("the core asked for a transfer though no handle was given to it")
        return self._transfer

    def _publish(self) -> None:
        events = self._core.drain_kv_events()
        self._kv_events += len(events)
        messages = self._numbers.messages(events, self._core.load(), self._clock())
        if self._publisher is None:
            for _ in messages:  # numbered all the same: snapshots say how far they go
                pass
        else:
            self._publisher.send(messages)

    def _beat(self) -> None:
        """A server that waits for the end of a drain hears of each change at once."""
        now, load = self._clock(), self._core.load()
        if now - self._heartbeat_at >= HEARTBEAT_S or (self._draining and load != self._told):
            self._heartbeat_at, self._told = now, load
            if self._transfer is not None:
                self._transfer.check_alive()
            self._link.send(Heartbeat(ticks=self._ticks, load=load, stats=self._stats()))

    def _check_when_quiet(self, *, heard: bool, worked: bool) -> None:
        """What was live is checked once nothing is and nothing happens, and then all blocks, a slice each idle turn.

        A check takes time that the other half of a hand-off would have to wait, so it keeps away from messages. Where
        something is heard all the time it comes a second after the last step, then each second; with steps in between
        at least each ten seconds.
        """
        now, idle = self._clock(), self._core.idle()
        if heard or worked:
            self._active_at, self._unchecked = now, True
        if worked or not idle:
            self._due_at = min(now + _UNCHECKED_S, self._checked_at + _MOST_UNCHECKED_S)
        if not idle or (now < self._active_at + _QUIET_S and now < self._due_at):
            return
        self._checked_at, self._due_at = now, now + _UNCHECKED_S
        self._check_books()
        self._core.walk_idle()

    def _check_books(self) -> None:
        if self._unchecked:
            self._unchecked = False
            self._core.check_accounts()
            if self._transfer is not None:
                self._transfer.check_integrity()

    def _wait_s(self) -> float:
        now = self._clock()
        tick_at = self._active_at + _QUIET_S if self._unchecked and self._core.idle() else now + _TICK_S
        until = min(self._heartbeat_at + HEARTBEAT_S, self._core.next_deadline, tick_at)
        return max(0.001, until - now)

    def _stats(self) -> EngineStats:
        stats = EngineStats(
            steps=self._steps,
            step_tokens=self._step_tokens,
            step_seconds=self._step_seconds,
            preemptions=self._core.preemptions,
            kv_events=self._kv_events,
            state_dropped=0 if self._publisher is None else self._publisher.dropped,
        )
        if self._transfer is None:
            return stats
        moved = self._transfer.state()
        return msgspec.structs.replace(
            stats,
            pulls=moved.pulls,
            pulls_ok=moved.pulls_ok,
            pulls_failed=moved.pulls_failed,
            pulled_bytes=moved.pulled_bytes,
            pull_seconds=moved.pull_seconds,
            sent_bytes=moved.sent_bytes,
            peers=moved.peers,
            leases_granted=moved.leases_granted,
            leases_ended=moved.leases_ended,
        )
