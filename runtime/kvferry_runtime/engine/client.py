"""The API server's end of the EngineCore: starts it, feeds it, hands its outputs to the legs, outlives it.

One supervisor task goes through the lives of the process. Its death, of whatever kind, ends every running leg with
``internal`` at once, and a new process with a new incarnation is started after a back-off that grows from 0.2 s to
10 s. A process that is there but does nothing (no step, no idle tick) is not ready after ``stall_timeout_s``, not live
after ``engine_wedged_s``, and killed after ``engine_kill_s``.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum

import msgspec

from kvferry_runtime.core.messages import AbortLeg, Drain, FailOut, HandOver, LegKey, StopChoice, Submit
from kvferry_runtime.engine.child import EngineChild, EngineGoneError
from kvferry_runtime.engine.messages import (
    Batch,
    Downward,
    EngineConfig,
    EngineStats,
    Heartbeat,
    NotStarted,
    PrefillAnswered,
    Ready,
    ResetPrefixCache,
    SnapshotReply,
    SnapshotRequest,
    Upward,
)
from kvferry_runtime.engine.streams import LegStream, LegStreams
from kvferry_service import logs
from kvferry_wire.state import Load

_BACK_OFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_HEALTHY_S = 60.0  # a life this long starts the back-off over
_WATCH_S = 0.05
_SNAPSHOT_S = 5.0

_log = logs.get_logger(__name__)


class EngineState(StrEnum):
    """Where the EngineCore process is in its life."""

    STARTING = "the engine is starting"
    RUNNING = "running"
    RESTARTING = "the engine has failed and is being started again"
    STOPPED = "the engine is stopped"
    REFUSED = "the engine cannot start as configured"


class EngineClient:
    """For one event loop. ``on_ready`` is awaited at each start that succeeded, before the engine counts as ready."""

    def __init__(self, config: EngineConfig, on_ready: Callable[[Ready], Awaitable[None]] | None = None) -> None:
        self._config = config
        self._limits = config.limits
        self._on_ready = on_ready
        self._child: EngineChild | None = None
        self._streams = LegStreams(self._limits.leg_outputs)
        self._snapshots: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._silence_s = 0.0
        self._ready = asyncio.Event()
        self.refused: asyncio.Future[NotStarted] = asyncio.get_running_loop().create_future()
        self.state = EngineState.STARTING
        self.info: Ready | None = None
        self.load: Load | None = None
        self.stats = EngineStats()
        self.ticks = 0
        self.starts = 0
        self.draining = False
        self._said = asyncio.Event()  # set at each heartbeat

    # ---- life

    def start(self) -> None:
        """Begin the first life; returns at once."""
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def wait_ready(self) -> Ready:
        """Wait until an engine is ready."""
        await self._ready.wait()
        assert self.info is not None
        return self.info

    async def close(self) -> None:
        """End the process, in order if it lets itself; every running leg fails. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        if self._child is not None and self.state is not EngineState.RUNNING:
            self._child.kill()  # it is loading, or has failed: nothing there is worth waiting for
        await self._end_life(EngineState.STOPPED)

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return None if self._child is None else self._child.pid

    def not_ready(self) -> str:
        """Why nothing can be submitted now; empty when it can."""
        if self.state is not EngineState.RUNNING:
            return self.state.value
        if self._silence_s > self._limits.stall_timeout_s:
            return f"the engine has done nothing for {self._silence_s:.0f} s"
        return ""

    def not_live(self) -> str:
        """Why this pod should be restarted; empty while its engine is starting, first or again, working or idle."""
        if self.state is EngineState.RUNNING and self._silence_s > self._limits.engine_wedged_s:
            return f"the engine has done nothing for {self._silence_s:.0f} s"
        return ""

    # ---- legs

    def submit(self, submit: Submit) -> LegStream:
        """Start a leg. Raises ``EngineGoneError``, or ``KeyError`` when a leg of this name is running."""
        if self.state is not EngineState.RUNNING:
            raise EngineGoneError(self.state.value)
        stream = self._streams.open(submit.key)
        try:
            self._send(submit)
        except EngineGoneError:
            self._streams.close(submit.key)
            raise
        return stream

    def finish(self, key: LegKey, *, abort: bool) -> None:
        """The server is done with a leg; ``abort`` unless the engine has said its last word on it. Idempotent."""
        if key not in self._streams:
            return
        self._streams.close(key)
        if abort:
            self._try_send(AbortLeg(key=key))

    def cancel(self, key: LegKey) -> None:
        """Abort by name: the leg's stream, if there is one, ends with ``cancelled``."""
        self._streams.fail(key, FailOut(key=key, kind="cancelled", message="The request was cancelled."))
        self._try_send(AbortLeg(key=key))

    def stop_choice(self, key: LegKey, choice: int) -> None:
        """A stop string ended this choice."""
        self._try_send(StopChoice(key=key, choice=choice))

    def hand_over(self, key: LegKey) -> bool:
        """Another pod will go on with this leg; false when it does not run here."""
        if key not in self._streams:
            return False
        self._try_send(HandOver(key=key))
        return True

    def answered(self, lease_id: int, *, delivered: bool) -> None:
        """An answer that names a lease was written, or could not be."""
        self._try_send(PrefillAnswered(lease_id=lease_id, delivered=delivered))

    def running(self) -> int:
        """Legs that the server waits for."""
        return len(self._streams)

    # ---- the rest

    async def snapshot(self) -> bytes:
        """The state stream's snapshot (msgpack). Raises ``EngineGoneError``."""
        if self.state is not EngineState.RUNNING:
            raise EngineGoneError(self.state.value)
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._snapshots[number] = future
        try:
            self._send(SnapshotRequest(number=number))
            async with asyncio.timeout(_SNAPSHOT_S):
                return await future
        except TimeoutError:
            raise EngineGoneError("the engine does not answer") from None
        finally:
            self._snapshots.pop(number, None)

    def drain(self) -> None:
        """Take nothing new, in later lives too."""
        self.draining = True
        self._try_send(Drain())

    async def stop_legs(self, grace_s: float, flush_s: float) -> None:
        """Take nothing new; wait until no leg runs and no lease is held; then end what is left with ``draining``.

        Args:
            grace_s: seconds for the legs to end well or to move, and for their leases to be read.
            flush_s: seconds for the callers to take the error of those that did not.
        """
        self.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._settled()
        except TimeoutError:
            leases = 0 if self.load is None else self.load.leases
            _log.warning(
                "the grace to drain is over", extra=logs.fields(grace_s=grace_s, legs=self.running(), leases=leases)
            )
        if failed := self._streams.fail_all("This pod is stopping.", "draining"):
            _log.warning("stopping with legs that run: they fail", extra=logs.fields(legs=failed))
            await self._streams.wait_empty(flush_s)

    async def _settled(self) -> None:
        """Wait until no leg runs, here or in the engine, and no lease is held. An engine that is gone holds nothing."""
        while True:
            await self._streams.wait_empty(None)
            if self.state is not EngineState.RUNNING:
                return
            self._said.clear()  # what it says next is younger than the end of the last leg
            await self._said.wait()
            load = self.load
            if load is not None and not (self._streams or load.running or load.waiting or load.leases):
                return

    def reset_prefix_cache(self) -> None:
        """Unpublish all cached blocks."""
        self._try_send(ResetPrefixCache())

    # ---- inside

    def _send(self, message: Downward) -> None:
        if self._child is None:
            raise EngineGoneError(self.state.value)
        self._child.send(message)

    def _try_send(self, message: Downward) -> None:
        """For messages that mean nothing to an engine that is gone; one that is stuck is killed soon."""
        try:
            self._send(message)
        except EngineGoneError as error:
            if self.state is EngineState.RUNNING:
                _log.warning("message lost: %s", error, extra=logs.fields(message_type=type(message).__name__))

    async def _supervise(self) -> None:
        failures = 0
        while True:
            born = asyncio.get_running_loop().time()
            self.starts += 1
            self._silence_s = 0.0
            try:
                self._child = EngineChild(self._config)
            except OSError as error:  # no process, no memory, no descriptor: perhaps later
                why: str | NotStarted = f"it could not be started: {error.strerror}"
            else:
                why = await self._live(self._child)
            if isinstance(why, NotStarted) and self.info is None:
                await self._end_life(EngineState.REFUSED)
                self.refused.set_result(why)
                return
            lived = asyncio.get_running_loop().time() - born
            failures = 0 if lived > _HEALTHY_S else failures + 1
            pause = _BACK_OFF_S[min(max(failures, 1), len(_BACK_OFF_S)) - 1]
            reason = why.message if isinstance(why, NotStarted) else why
            _log.error(
                "the engine has ended: %s", reason, extra=logs.fields(legs=len(self._streams), restart_in_s=pause)
            )
            await self._end_life(EngineState.RESTARTING)
            await asyncio.sleep(pause)

    async def _live(self, child: EngineChild) -> str | NotStarted:
        """One life, to its end; returns why it ended."""
        reader = asyncio.create_task(self._read(child), name="engine-reader")
        watchdog = asyncio.create_task(self._watch(child), name="engine-watchdog")
        try:
            await asyncio.wait({reader, watchdog}, return_when=asyncio.FIRST_COMPLETED)
            # What the process said last counts more than that it is gone.
            first = reader if reader.done() else watchdog
            return await first
        except EngineGoneError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - a fault of ours ends this life, never the supervision
            _log.error("the engine cannot be used", exc_info=error)
            return repr(error)
        finally:
            for task in (reader, watchdog):
                task.cancel()
            await asyncio.gather(reader, watchdog, return_exceptions=True)

    async def _read(self, child: EngineChild) -> str | NotStarted:
        while True:
            message = await child.receive()
            self._silence_s = 0.0
            if isinstance(message, NotStarted):
                return message
            await self._on_message(message)

    async def _on_message(self, message: Upward) -> None:
        match message:
            case Batch():
                self.ticks = message.ticks
                for output in message.outputs:
                    lost = self._streams.dispatch(output)
                    if lost is None:
                        continue
                    if lost.lease_id is not None:
                        self.answered(lost.lease_id, delivered=False)
                    if lost.overflow:
                        self._try_send(AbortLeg(key=output.key))
            case Heartbeat():
                self.ticks, self.load, self.stats = message.ticks, message.load, message.stats
                self._said.set()
            case SnapshotReply():
                future = self._snapshots.get(message.number)
                if future is not None and not future.done():
                    future.set_result(message.snapshot)
            case Ready():
                await self._on_start(message)
            case NotStarted():
                raise AssertionError("handled by the reader")

    async def _on_start(self, ready: Ready) -> None:
        # A restarted engine keeps its ports, so that peers and subscribers find it again.
        self._config = msgspec.structs.replace(
            self._config,
            control_port=ready.control_port,
            data_port=ready.data_port,
            state_port=ready.state_port,
        )
        self.info = ready
        self.stats = EngineStats()
        if self._on_ready is not None:
            await self._on_ready(ready)
        self.state = EngineState.RUNNING
        if self.draining:
            self._send(Drain())
        self._ready.set()

    async def _watch(self, child: EngineChild) -> str:
        """Returns when the process has ended; kills one that does nothing.

        Silence counts this loop's own turns, not the clock: after a pause of this very process the messages that
        wait are read before anything is judged.
        """
        loop = asyncio.get_running_loop()
        last = loop.time()
        while (status := child.exit_status()) is None:
            await asyncio.sleep(_WATCH_S)
            now = loop.time()
            self._silence_s += min(now - last, 4 * _WATCH_S)
            last = now
            allowed = self._limits.engine_kill_s if self.state is EngineState.RUNNING else self._limits.engine_start_s
            if self._silence_s > allowed:
                child.kill()
                return f"killed after {self._silence_s:.0f} s without a sign of life"
        await asyncio.sleep(_WATCH_S)  # lets the reader take what the process said before it ended
        return f"exit status {status}" if status >= 0 else f"signal {-status}"

    async def _end_life(self, state: EngineState) -> None:
        self.state = state
        self._ready.clear()
        self._said.set()
        self._silence_s = 0.0
        self._streams.fail_all("The engine failed.")
        for future in self._snapshots.values():
            if not future.done():
                future.set_exception(EngineGoneError(state.value))
        # Forgotten only once it is closed: a cancelled close is taken up again by the next one.
        if self._child is not None:
            await self._child.close()
            self._child = None
