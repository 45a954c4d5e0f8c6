"""Legs in the API server: a ``Leg`` goes to the engine, its outputs come back as frames.

A leg is an async iterator of frame groups; a group is what may be written at once. The first comes as soon as the
engine has the leg, or the leg has failed; it may be empty. Closing the iterator before its end (the caller's connection
broke) aborts the leg in the engine. After the group that holds ``Prefilled`` or ``Handoff`` the caller asks for the
next one when, and only when, the group was written: that starts the lease. Of an attached leg ``Alive`` follows, until
the lease is taken up or over; closing the iterator before ends the lease.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvferry_runtime.core.messages import (
    EngineOutput,
    FailOut,
    HandedOver,
    LeaseSettled,
    LegKey,
    PrefilledOut,
    Submit,
    TokensOut,
)
from kvferry_runtime.core.tombstones import Tombstones
from kvferry_runtime.engine.child import EngineGoneError
from kvferry_runtime.engine.client import EngineClient
from kvferry_runtime.engine.streams import LegStream
from kvferry_runtime.server.leg_check import context_fault, leg_fault
from kvferry_runtime.server.metrics import LegClock, PodMetrics
from kvferry_service import logs
from kvferry_text.answer import AnswerWriter, Written
from kvferry_text.bundle import TextTools
from kvferry_wire.frames import Alive, Begun, End, Fail, Frame, Handoff, Prefilled, Tokens
from kvferry_wire.leg import AbortRequest, Leg
from kvferry_wire.limits import Limits

FrameGroup = list[Frame]

_log = logs.get_logger(__name__)


class Legs:
    """Starts legs and aborts them by name. For one event loop."""

    def __init__(
        self, engine: EngineClient, tools: TextTools, metrics: PodMetrics, limits: Limits, max_running: int
    ) -> None:
        self._engine = engine
        self._tools = tools
        self._metrics = metrics
        self._limits = limits
        self._most = limits.queue + max_running
        self._tombstones = Tombstones(limits.tombstone_s, limits.tombstones)
        self._now: Callable[[], float] = time.monotonic

    def abort(self, request: AbortRequest) -> None:
        """Idempotent: stops the leg if it runs, and refuses it if it comes later."""
        key = LegKey(request.internal_id, request.attempt)
        self._tombstones.add(key, self._now())
        self._engine.cancel(key)

    def hand_over(self, request: AbortRequest) -> bool:
        """Another pod will go on with this leg: its stream ends with ``Handoff``, or ``Fail`` if it has no KV.

        Idempotent. False when it does not run here (any more).
        """
        return self._engine.hand_over(LegKey(request.internal_id, request.attempt))

    async def prefill(self, leg: Leg) -> AsyncGenerator[FrameGroup]:
        """The frames of a prefill leg: ``Alive``, then ``Prefilled`` or ``Fail``."""
        clock = self._metrics.started("prefill", self._now())
        opened = self._fault(leg, "prefill") or self._open(leg, "prefill")
        if isinstance(opened, Fail):
            yield [self._failed(opened)]
            return
        undelivered: int | None = None
        ended = False
        try:
            yield []
            async for output in _outputs(self._engine, opened, self._limits):
                if isinstance(output, Alive):
                    yield [output]
                elif isinstance(output, FailOut):
                    ended = True
                    yield [self._failed(Fail(kind=output.kind, message=output.message))]
                    return
                elif isinstance(output, PrefilledOut):
                    ended = True
                    undelivered = None if output.handle is None else output.handle.lease_id
                    self._prefilled(clock, leg, output)
                    yield [Prefilled(first=output.first, cached_tokens=output.cached_tokens, handle=output.handle)]
                    lease, undelivered = undelivered, None
                    self._done(clock, leg, ("prefilled",), output.cached_tokens, "")
                    if lease is not None:
                        async with aclosing(self._answered(leg, lease, opened)) as signs:
                            async for sign in signs:
                                yield sign
                    return
        finally:
            if undelivered is not None:
                self._engine.answered(undelivered, delivered=False)
            if not ended or undelivered is not None:
                self._abandoned(clock, leg)
            self._engine.finish(opened.key, abort=not ended)

    async def generate(self, leg: Leg) -> AsyncGenerator[FrameGroup]:
        """The frames of a generate leg: ``Tokens`` and ``Alive``, then ``End`` or ``Fail``."""
        clock = self._metrics.started("generate", self._now())
        fault = self._fault(leg, "generate")
        try:
            writer = None if fault is not None else AnswerWriter(leg, self._tools.tokenizer)
        except ValueError as error:
            writer, fault = None, Fail(kind="invalid", message=str(error), param="choices")
        if writer is None:
            yield [self._failed(fault or Fail(kind="internal", message=""))]
            return
        if writer.finished_at_start():
            self._give_up_lease(leg)
            yield [self._ended(clock, leg, writer, leg.cached_tokens, leg.recompute)]
            return
        opened = self._open(leg, "generate")
        if isinstance(opened, Fail):
            yield [self._failed(opened)]
            return
        answer = _Answer(leg, writer, self._engine, opened.key)
        ended = told = False
        undelivered: int | None = None
        try:
            yield answer.opening()
            async for output in _outputs(self._engine, opened, self._limits):
                if isinstance(output, Alive):
                    yield [output]
                    continue
                group: FrameGroup = []
                # What has arrived together is written together.
                for each in [output, *opened.take()]:
                    if isinstance(each, FailOut):
                        ended = told = True
                        fail = Fail(kind=each.kind, message=each.message, param=each.reason or None)
                        yield [*group, self._failed(fail)]
                        return
                    if isinstance(each, HandedOver):
                        ended = True
                        if each.handle is None:
                            yield [*group, self._failed(Fail(kind="draining", message="This pod has no KV to give."))]
                            return
                        undelivered = each.handle.lease_id
                        yield [*group, Handoff(handle=each.handle)]
                        lease, undelivered, told = undelivered, None, True
                        self._done(clock, leg, ("moved",), answer.cached, answer.recomputed)
                        self._metrics.moved()
                        async with aclosing(self._answered(leg, lease, opened)) as signs:
                            async for sign in signs:
                                yield sign
                        return
                    if isinstance(each, TokensOut):
                        self._count(clock, leg, each)
                        group += answer.take(each)
                        if writer.finished():
                            ended, told = answer.engine_knows(), True
                            yield [*group, self._ended(clock, leg, writer, answer.cached, answer.recomputed)]
                            return
                if group:
                    yield group
        finally:
            if undelivered is not None:
                self._engine.answered(undelivered, delivered=False)
            if not told:
                self._abandoned(clock, leg)
            self._engine.finish(opened.key, abort=not ended)

    async def _answered(self, leg: Leg, lease_id: int, stream: LegStream) -> AsyncGenerator[FrameGroup]:
        """The answer that names a lease was written: the lease begins.

        That of an attached leg goes with its connection until a reader has taken it up, and the stream ends then. If
        the connection ends first, as when a router dies, nobody will read the KV: it is freed at once.
        """
        self._engine.answered(lease_id, delivered=True)
        if not leg.attached:
            return
        settled = False
        try:
            async for output in _outputs(self._engine, stream, self._limits):
                if isinstance(output, Alive):
                    yield [output]
                elif isinstance(output, (LeaseSettled, FailOut)):
                    settled = True  # or the engine is gone, or the leg was aborted by name, and the lease with it
                    return
        finally:
            if not settled:
                _log.info("a lease goes with its connection", extra=logs.fields(attempt=leg.attempt))
                self._engine.answered(lease_id, delivered=False)

    # ---- starting

    def _fault(self, leg: Leg, kind: str) -> Fail | None:
        key = LegKey(leg.internal_id, leg.attempt)
        if self._tombstones.holds(key, self._now()):
            return Fail(kind="cancelled", message="The request was cancelled before it arrived.")
        fault = leg_fault(leg, self._tools.bundle, self._limits)
        if fault is not None:
            return fault
        ready = self._engine.info
        if ready is not None and leg.compat_hash not in ("", ready.compat_hash):
            # An address may be another pod's by now. Another one may serve it.
            return Fail(kind="draining", message="This pod's model is not the one that the answer was begun with.")
        if ready is not None and kind == "generate" and (fault := context_fault(leg, ready.max_model_len)) is not None:
            return fault
        if self._engine.draining:
            return Fail(kind="draining", message="This pod takes nothing new.")
        if self._engine.running() >= self._most:
            return Fail(kind="busy", message=f"{self._most} requests are being served or wait.")
        return None

    def _open(self, leg: Leg, kind: str) -> LegStream | Fail:
        """Give a leg that has no fault to the engine."""
        submit = Submit(
            key=LegKey(leg.internal_id, leg.attempt),
            kind="prefill" if kind == "prefill" else "generate",
            prompt_ids=leg.prompt_ids,
            emitted=tuple(choice.emitted for choice in leg.choices),
            sampling=leg.sampling,
            extras=leg.extras,
            deadline_s=leg.deadline_ms / 1000,
            eos_token_ids=self._tools.bundle.eos_token_ids,
            handle=leg.handle,
            recompute=leg.recompute,
            must_pull=leg.must_pull,
        )
        try:
            return self._engine.submit(submit)
        except KeyError:
            return Fail(kind="invalid", message="A leg of this internal_id and attempt is running.", param="attempt")
        except EngineGoneError:
            # Nothing was begun: another pod can serve it. Not "busy", which would tell the client of a full service.
            return Fail(kind="draining", message="The engine is not ready.")

    def _give_up_lease(self, leg: Leg) -> None:
        """Nothing is to be computed, so the lease that the handle names is not needed: the engine tells its owner."""
        if leg.handle is None:
            return
        opened = self._open(leg, "generate")
        if not isinstance(opened, Fail):
            self._engine.finish(opened.key, abort=True)

    # ---- counting

    def _prefilled(self, clock: LegClock, leg: Leg, output: PrefilledOut) -> None:
        self._metrics.prompt_done(clock, len(leg.prompt_ids), output.cached_tokens, pulled=False)
        self._metrics.tokens(clock, len(output.first), self._now())
        self._metrics.ended(clock, ("length",) if output.handle is not None else ("stop",), self._now())

    def _count(self, clock: LegClock, leg: Leg, output: TokensOut) -> None:
        if output.recomputed and leg.handle is not None:
            self._metrics.recomputed(output.recomputed)
        pulled = leg.handle is not None and not output.recomputed
        self._metrics.prompt_done(clock, len(leg.prompt_ids), output.cached_tokens, pulled=pulled)
        self._metrics.tokens(clock, len(output.ids), self._now())

    def _ended(self, clock: LegClock, leg: Leg, writer: AnswerWriter, cached: int, recomputed: str) -> End:
        end = writer.end(cached, recomputed)
        self._metrics.ended(clock, end.finish, self._now())
        self._done(clock, leg, end.finish, cached, recomputed)
        return end

    def _done(self, clock: LegClock, leg: Leg, finish: tuple[str, ...], cached: int, recomputed: str) -> None:
        _log.info("leg done", extra=self._fields(clock, leg, finish=finish, cached=cached, recomputed=recomputed))

    def _abandoned(self, clock: LegClock, leg: Leg) -> None:
        """The connection ended before the answer did."""
        self._metrics.abandoned()
        _log.info("leg abandoned by its client", extra=self._fields(clock, leg))

    def _fields(self, clock: LegClock, leg: Leg, **more: object) -> dict[str, dict[str, object]]:
        return logs.fields(
            kind=clock.kind,
            attempt=leg.attempt,
            prompt_tokens=len(leg.prompt_ids),
            tokens=clock.tokens,
            seconds=round(self._now() - clock.started, 4),
            **more,
        )

    def _failed(self, fail: Fail) -> Fail:
        self._metrics.failed(fail.kind)
        level = logging.ERROR if fail.kind == "internal" else logging.INFO
        # Messages are ours and fit for clients: they hold no prompt.
        _log.log(level, "leg failed: %s", fail.message, extra=logs.fields(fail=fail.kind))
        return fail


class _Answer:
    """One generate leg between its engine outputs and its writer."""

    def __init__(self, leg: Leg, writer: AnswerWriter, engine: EngineClient, key: LegKey) -> None:
        self._leg = leg
        self._writer = writer
        self._engine = engine
        self._key = key
        self._begun = False
        self._stopped: set[int] = set()  # choices that a stop string ended; the engine was told
        self._finished: set[int] = set()  # choices that the engine ended
        self.cached = leg.cached_tokens
        self.recomputed = leg.recompute

    def opening(self) -> FrameGroup:
        """What the client can have before the engine has done anything: the role, and text of the first tokens."""
        frames: FrameGroup = []
        if data := self._writer.opening():
            frames.append(Tokens(choice=0, ids=(), data=data))
        for choice, written in self._writer.catch_up():
            self._note_stop(choice, written)
            if written.data:
                frames.append(Tokens(choice=choice, ids=(), data=written.data, chars=written.chars))
        return frames

    def take(self, output: TokensOut) -> FrameGroup:
        """The frames of one output; none for what a stopped choice still made."""
        if output.recomputed:
            self.recomputed = output.recomputed
        if not any(choice.emitted for choice in self._leg.choices) and output.cached_tokens:
            self.cached = output.cached_tokens
        # The engine repeats the end of choices that had ended on an earlier leg, and may not know of a stop string yet.
        if output.choice in self._writer.finished_choices():
            return []
        frames: FrameGroup = []
        if output.ids and not self._begun:
            self._begun = True
            frames.append(Begun(cached_tokens=self.cached, recomputed=self.recomputed))
        written = self._writer.push(output.choice, output.ids, output.finish, output.stop_token)
        if output.finish is not None:
            self._finished.add(output.choice)
        self._note_stop(output.choice, written)
        if written.ids or written.data:
            frames.append(Tokens(choice=output.choice, ids=written.ids, data=written.data, chars=written.chars))
        return frames

    def engine_knows(self) -> bool:
        """Whether the engine has ended the leg itself: every choice finished there."""
        return not self._stopped

    def _note_stop(self, choice: int, written: Written) -> None:
        if written.stopped and choice not in self._stopped and choice not in self._finished:
            self._stopped.add(choice)
            self._engine.stop_choice(self._key, choice)


async def _outputs(engine: EngineClient, stream: LegStream, limits: Limits) -> AsyncGenerator[EngineOutput | Alive]:
    """A leg's outputs, and ``Alive`` each second without one, as long as the engine's ticks go on."""
    ticks = engine.ticks
    while True:
        output = await stream.next(limits.alive_interval_s)
        if output is not None:
            yield output
        elif engine.ticks > ticks:
            ticks = engine.ticks
            yield Alive(step=ticks)
