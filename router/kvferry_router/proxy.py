"""Performs what a request's flow decides: opens and aborts legs, keeps the books, hands bytes to the client."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass

from aiohttp import web

from kvferry_router import failures
from kvferry_router.alarm import Alarm
from kvferry_router.discovery.endpoints import Endpoint
from kvferry_router.discovery.watch import PodWatch
from kvferry_router.flow import RequestFlow
from kvferry_router.flow_messages import (
    AbortLeg,
    Book,
    ClientGone,
    Computed,
    Effect,
    Event,
    FailAnswer,
    FailurePolicy,
    Ferried,
    FinishAnswer,
    FinishLeg,
    Kind,
    LegClosed,
    NeedPod,
    OpenLeg,
    PodChosen,
    PodFailed,
    Record,
    Release,
    Resumed,
    Send,
    Start,
    Stopping,
    Tick,
)
from kvferry_router.flow_states import State
from kvferry_router.given import IdBudget
from kvferry_router.legs import run_leg
from kvferry_router.metrics import RouterMetrics
from kvferry_router.output import ClientStalledError, Output
from kvferry_router.pod_client import PodClient
from kvferry_router.pool import Hashes, PodPool
from kvferry_router.resumes import ResumeBudget, Suspects
from kvferry_router.select.candidates import Ask
from kvferry_router.select.policy import Decision
from kvferry_service import logs
from kvferry_wire.leg import Leg
from kvferry_wire.limits import Limits

# A tick that comes later than this says that the loop was held up: what arrived meanwhile is taken first.
_LATE_S = 0.25
_DRAIN_S = 1.0  # after the request's end, for the streams of legs that have said all
_log = logs.get_logger(__name__)


class Background:
    """Tasks that outlive the request that started them; they are bounded in time and ended with the router."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, grace_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Proxy:
    """What all requests share."""

    pool: PodPool
    client: PodClient
    watch: PodWatch
    metrics: RouterMetrics
    limits: Limits
    background: Background
    failure_policy: FailurePolicy
    id_budget: IdBudget
    resumes: ResumeBudget
    suspects: Suspects


class RequestRun:
    """One request under way: the flow, its legs' tasks and its timer."""

    def __init__(
        self,
        proxy: Proxy,
        request: web.Request,
        leg: Leg,
        ask: Ask,
        hashes: Hashes,
        *,
        deadline_s: float,
        accepted_at: float,
    ) -> None:
        self._proxy = proxy
        self._ask = ask
        self._hashes = hashes
        self._leg = leg
        self._loop = asyncio.get_running_loop()
        self._flow = RequestFlow(
            leg,
            proxy.limits,
            deadline_s=deadline_s,
            accepted_at=accepted_at,
            policy=proxy.failure_policy,
            budget=proxy.id_budget,
        )
        self._output = Output(request, proxy.limits)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._events: deque[Event] = deque()
        self._handling = False
        self._alarm = Alarm(self._loop, self._on_alarm)
        self._catching_up = False
        self._sent_at: float | None = None
        self._cached: dict[str, int] = {}  # prompt tokens, by pod, as the last decision saw it

    async def answer(self, decision: Decision) -> web.StreamResponse:
        """Work on the request until its client has the answer or is gone. Leaves no leg, booking or timer behind.

        Raises:
            ApiError: the answer is an error.
        """
        assert decision.decode is not None
        self._note(decision)
        try:
            self._deliver(Start(decision.prefill, decision.decode, decision.compat_hash))
            return await self._output.answer()
        except ClientStalledError:
            self._deliver(ClientGone(stalled=True))
            self._output.cut()
            raise ConnectionResetError("the client takes no bytes") from None
        except (asyncio.CancelledError, ConnectionError):
            self._deliver(ClientGone())
            raise
        finally:
            if self._flow.state is not State.DONE:
                self._deliver(ClientGone())
            self._alarm.close()
            for task in self._tasks.values():  # only this ends a stream that stays open
                self._loop.call_later(_DRAIN_S, task.cancel)

    def stop(self) -> None:
        """End the answer now, with an error that says that the router stops; ``answer`` writes it."""
        self._deliver(Stopping())

    def place(self) -> tuple[str, int, str, int] | None:
        """The decode leg that another pod could go on from: internal id, attempt, pod, tokens of the whole."""
        movable = self._flow.movable()
        whole = self._ask.prompt_tokens + self._ask.answer_tokens
        return None if movable is None else (self._leg.internal_id, *movable, whole)

    def move(self) -> None:
        """Ask that leg to leave its pod."""
        movable = self._flow.movable()
        record = None if movable is None else self._proxy.pool.table.get(movable[1])
        if movable is None or record is None:
            return
        self._flow.asked_to_move()
        attempt, endpoint, internal_id = movable[0], record.endpoint, self._leg.internal_id

        async def ask() -> None:
            taken = await self._proxy.client.hand_over(endpoint, internal_id, attempt)
            self._proxy.metrics.moves.labels(str(taken).lower()).inc()

        self._proxy.background.start(ask(), "move")

    # ---- events ------------------------------------------------------------------------------------------------

    def _deliver(self, event: Event) -> None:
        """Give the flow an event and do what it says. An event that an effect brings about waits its turn."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self._flow.handle(self._events.popleft(), self._loop.time()):
                    self._perform(effect)
        finally:
            self._handling = False
        self._arm()

    def _arm(self) -> None:
        """A timer that is due too early costs one look; one that is never moved costs nothing per frame."""
        due = self._flow.next_wakeup()
        if due is None:
            self._alarm.cancel()
            self._catching_up = False
        elif not self._catching_up:
            self._alarm.set(due)

    def _on_alarm(self, due: float) -> None:
        now = self._loop.time()
        if now - due > _LATE_S:
            self._catching_up = True
            self._alarm.set(now + _LATE_S / 2)
            return
        self._catching_up = False
        try:
            self._deliver(Tick())
        except Exception:  # noqa: BLE001 - a bug of ours must not leave the request without a timer
            self._broken("the request's timer failed")

    def _broken(self, what: str) -> None:
        """A bug of ours ends the request it hit, with an answer; ``answer`` tidies up."""
        _log.exception(what)
        self._events.clear()
        self._output.finish(FailAnswer(failures.ENGINE_FAILED, in_band=True))

    # ---- effects -----------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case OpenLeg():
                self._open(effect)
            case FinishLeg():
                pass  # its pod closes the stream: at once, or when the lease that it ended in was taken up
            case AbortLeg(attempt, pod):
                self._abort(attempt, pod)
            case Book():
                self._book(effect)
            case Computed(kind):
                self._proxy.pool.bookings.computed(self._key(kind))
            case Release(kind):
                self._proxy.pool.bookings.release(self._key(kind))
            case NeedPod():
                self._events.append(self._choose(effect))
            case PodFailed():
                self._pod_failed(effect)
            case Ferried(prefill, decode, reason):
                self._proxy.pool.ferried(prefill, decode, reason, self._loop.time())
            case Resumed():
                self._resumed(effect)
            case FinishAnswer() | FailAnswer():
                self._output.finish(effect)
            case Record():
                self._record(effect)

    def _key(self, kind: Kind) -> tuple[str, str]:
        return self._leg.internal_id, kind

    def _send(self, effect: Send) -> None:
        now = self._loop.time()
        if self._sent_at is not None and effect.tokens:
            self._proxy.metrics.between_tokens.observe((now - self._sent_at) / effect.tokens)
        if effect.tokens:
            self._sent_at = now
        if not self._output.send(effect.data, effect.path):
            _log.warning("a client reads too slowly")
            self._events.append(ClientGone(stalled=True))
            self._output.cut()

    def _open(self, effect: OpenLeg) -> None:
        record = self._proxy.pool.table.get(effect.pod)
        attempt = effect.leg.attempt
        if record is None:
            self._loop.call_soon(self._deliver, LegClosed(attempt, "refused"))
            return
        work = self._run_leg(effect, record.endpoint)
        self._tasks[attempt] = self._proxy.background.start(work, f"{effect.kind} leg")

    async def _run_leg(self, effect: OpenLeg, endpoint: Endpoint) -> None:
        client, limits, kind, leg = self._proxy.client, self._proxy.limits, effect.kind, effect.leg
        try:
            await run_leg(client, endpoint, kind, leg, limits=limits, deliver=self._deliver)
        except Exception:  # noqa: BLE001 - told to the log and to the client
            self._broken("a leg's task failed")
        finally:
            self._tasks.pop(leg.attempt, None)

    def _drop_task(self, attempt: int) -> None:
        if (task := self._tasks.pop(attempt, None)) is not None:
            task.cancel()

    def _abort(self, attempt: int, pod: str) -> None:
        self._drop_task(attempt)
        record = self._proxy.pool.table.get(pod)
        if record is not None:
            endpoint, internal_id = record.endpoint, self._leg.internal_id

            async def abort() -> None:
                confirmed = await self._proxy.client.abort(endpoint, internal_id, attempt)
                self._proxy.metrics.aborts.labels(str(confirmed).lower()).inc()

            self._proxy.background.start(abort(), "abort")

    def _book(self, effect: Book) -> None:
        pool = self._proxy.pool
        tokens = blocks = 0
        record = pool.table.get(effect.pod)
        if effect.computes:
            tokens = self._ask.prompt_tokens - self._cached.get(effect.pod, 0)
        if effect.kind == "decode" and record is not None and record.info is not None:
            blocks = -(-(self._ask.prompt_tokens + self._ask.growth_tokens) // record.info.block_size)
        pool.bookings.book(self._key(effect.kind), effect.pod, prefill_tokens=tokens, decode_blocks=blocks)

    def _choose(self, effect: NeedPod) -> PodChosen:
        if effect.resume and not self._proxy.resumes.take(self._loop.time()):
            return PodChosen(effect.kind, None)
        decision = self._proxy.pool.choose_again(self._ask, self._hashes, self._loop.time(), effect)
        self._note(decision)
        if effect.kind == "prefill":
            return PodChosen("prefill", decision.prefill)
        return PodChosen("decode", decision.decode, decision.prefill)

    def _note(self, decision: Decision) -> None:
        self._proxy.metrics.decisions.labels(decision.reason).inc()
        for scores in decision.scores.values():
            self._cached |= {s.pod: int(s.terms["cached_tokens"]) for s in scores if "cached_tokens" in s.terms}

    def _pod_failed(self, effect: PodFailed) -> None:
        self._proxy.metrics.pod_failures.labels(effect.kind, effect.reason).inc()
        _log.warning("a leg failed", extra=logs.fields(pod=effect.pod, kind=effect.kind, reason=effect.reason))
        record = self._proxy.pool.table.get(effect.pod)
        if record is not None and effect.reason in ("dead", "stalled"):
            record.suspected(f"a {effect.kind} leg found it {effect.reason}")
            self._proxy.watch.nudge(effect.pod)

    def _resumed(self, effect: Resumed) -> None:
        self._proxy.metrics.resumes.labels(effect.cause).inc()
        self._proxy.metrics.resume_gap.observe(effect.gap_s)

    def _record(self, record: Record) -> None:
        metrics = self._proxy.metrics
        metrics.requests.labels(record.outcome, record.path).inc()
        metrics.duration.observe(record.ended_at - record.accepted_at)
        first = None
        if record.first_token_at is not None:
            first = record.first_token_at - record.accepted_at
            metrics.first_token.observe(first)
        if record.recomputed:
            metrics.recomputes.labels(metrics.recompute_reason.value(record.recomputed)).inc()
        if record.gave_up:
            metrics.gave_up.labels(record.gave_up).inc()
        if record.gave_up == "barren":
            self._proxy.suspects.add(self._leg, self._loop.time())
        _log.info(
            "request",
            extra=logs.fields(
                outcome=record.outcome,
                path=record.path,
                prefill=record.prefill_pod,
                decode=record.decode_pod,
                prompt_tokens=record.prompt_tokens,
                completion_tokens=record.completion_tokens,
                cached_tokens=record.cached_tokens,
                recomputed=record.recomputed or None,
                legs=record.legs,
                resumed=", ".join(record.resumed) or None,
                gave_up=record.gave_up,
                ttft_ms=None if first is None else round(1000 * first, 1),
                duration_ms=round(1000 * (record.ended_at - record.accepted_at), 1),
            ),
        )
