"""The tasks that keep the pool in step with the world: discovery, and each pod's probe and state stream."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import cast

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from kvferry_router.discovery.endpoints import Discovery, Endpoint
from kvferry_router.discovery.pod_table import PodRecord
from kvferry_router.index.feed import FeedEffect, FetchSnapshot
from kvferry_router.metrics import RouterMetrics
from kvferry_router.pod_client import PodAnswerError, PodClient
from kvferry_router.pool import PodPool
from kvferry_router.text_service import TextService
from kvferry_service import logs
from kvferry_service.curve import connect_tcp, secure_client
from kvferry_wire import state
from kvferry_wire.limits import Limits

_INFO_EVERY_S = 5.0
_CALL_ERRORS = (PodAnswerError, aiohttp.ClientError, OSError, TimeoutError)
_log = logs.get_logger(__name__)


class PodWatch:
    """Watches all pods that discovery names. ``run`` ends when it is cancelled."""

    def __init__(
        self,
        *,
        discovery: Discovery,
        pool: PodPool,
        client: PodClient,
        text: TextService,
        state_key: bytes,
        limits: Limits,
        metrics: RouterMetrics,
    ) -> None:
        self._discovery = discovery
        self._pool = pool
        self._client = client
        self._text = text
        self._state_key = state_key
        self._limits = limits
        self._metrics = metrics
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nudges: dict[str, asyncio.Event] = {}
        metrics.bookings.set_function(lambda: len(pool.bookings))

    async def run(self) -> None:
        """Follow discovery until cancelled, or until it fails; then all tasks and sockets are closed."""
        following = asyncio.create_task(self._discovery.follow(self._pods_are), name="discovery")
        try:
            while not following.done():
                self._show()
                await asyncio.wait([following], timeout=self._limits.pod_poll_s)
            following.result()
        finally:
            tasks = [following, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._context.destroy(linger=0)

    def nudge(self, pod: str) -> None:
        """Probe this pod now."""
        if (event := self._nudges.get(pod)) is not None:
            event.set()

    def _pods_are(self, endpoints: tuple[Endpoint, ...]) -> None:
        before = {record.name: record.endpoint.withheld for record in self._pool.table}
        new, gone = self._pool.table.replace(endpoints)
        for record in gone:
            self._tasks.pop(record.name).cancel()
            self._nudges.pop(record.name).set()
            self._pool.forget(record.name)
        for record in new:
            self._nudges[record.name] = asyncio.Event()
            self._tasks[record.name] = asyncio.create_task(self._watch(record), name=f"watch {record.name}")
        for record in self._pool.table:
            if before.get(record.name, record.endpoint.withheld) != record.endpoint.withheld:
                self.nudge(record.name)
        self._show()
        if new or gone:
            _log.info("pods changed", extra=logs.fields(new=[r.name for r in new], gone=[r.name for r in gone]))

    def _show(self) -> None:
        self._pool.undiscovered = self._discovery.why_unknown()
        self._metrics.discovery_connected.set(self._discovery.current())
        counts: dict[tuple[str, str], int] = {}
        for role in ("prefill", "decode", "both"):
            for known in ("ready", "not_ready"):
                counts[role, known] = 0
        usable = {record.name for kind in ("prefill", "decode") for record in self._pool.usable(kind)}
        for record in self._pool.table:
            counts[record.endpoint.role, "ready" if record.name in usable else "not_ready"] += 1
        for (role, known), count in counts.items():
            self._metrics.pods.labels(role, known).set(count)
        self._metrics.index_blocks.set(self._pool.index.blocks)
        dropped, self._pool.index.dropped = self._pool.index.dropped, 0
        self._metrics.index_dropped.inc(dropped)

    # ---- one pod -----------------------------------------------------------------------------------------------

    async def _watch(self, record: PodRecord) -> None:
        follower = asyncio.create_task(_logged(self._follow, record), name=f"follow {record.name}")
        try:
            await _logged(self._poll, record)
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def _poll(self, record: PodRecord) -> None:
        loop = asyncio.get_running_loop()
        nudge = self._nudges[record.name]
        told, info_at = record.reason, 0.0
        while True:
            probe = await self._client.probe(record.endpoint)
            record.probed(probe)
            if record.answers and (record.info_due or loop.time() - info_at >= _INFO_EVERY_S or self._renamed(record)):
                await self._ask(record, loop.time())
                info_at = loop.time()
            reason = record.why_unusable(self._pool.model)
            if reason != told:
                told = reason
                _log.info("pod " + ("is out" if reason else "is in"), extra=logs.fields(pod=record.name, reason=reason))
            nudge.clear()
            if probe.result == "late" and record.answers:
                continue  # ask again at once: one late answer alone tells nothing
            with suppress(TimeoutError):  # time to ask again
                async with asyncio.timeout(self._limits.pod_poll_s):
                    await nudge.wait()

    def _renamed(self, record: PodRecord) -> bool:
        """Whether the state stream speaks of another incarnation than the description."""
        heard = record.feed.incarnation
        return heard is not None and record.info is not None and heard.hex() != record.info.incarnation

    async def _ask(self, record: PodRecord, now: float) -> None:
        """Let the pod describe itself, and load its text bundle if it is a new one."""
        try:
            info = await self._client.info(record.endpoint)
            if not self._text.has(info.text_digest):
                await self._text.ensure(info.text_digest, lambda: self._client.text(record.endpoint))
        except _CALL_ERRORS as error:
            _log.warning(
                "a pod that is ready does not describe itself", extra=logs.fields(pod=record.name, reason=str(error))
            )
            return
        heard = record.feed.incarnation
        if record.informed(info) and heard is not None and heard.hex() != info.incarnation:
            self._take(record, record.feed.restart(now))

    async def _follow(self, record: PodRecord) -> None:
        """Subscribe to the pod's state stream and feed the index from it."""
        loop = asyncio.get_running_loop()
        socket = self._context.socket(zmq.SUB)
        fetches: set[asyncio.Task[None]] = set()
        try:
            # Only options are set and an address is named, which both kinds of socket take alike.
            plain = cast("zmq.Socket[bytes]", socket)
            secure_client(plain, self._state_key, self._limits)
            socket.setsockopt(zmq.RCVHWM, self._limits.state_buffer)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            connect_tcp(plain, record.endpoint.host, record.endpoint.state)
            record.feed.start(loop.time())
            while True:
                if await socket.poll(int(1000 * self._limits.load_interval_s)):
                    frame = await socket.recv()
                    try:
                        message = state.decode_message(frame)
                    except msgspec.DecodeError:
                        _log.warning("a state message is not of the schema", extra=logs.fields(pod=record.name))
                        continue
                    before = dict(record.feed.rejoins)
                    effects = record.feed.message(message, loop.time())
                    self._count_rejoins(before, record.feed.rejoins)
                else:
                    effects = record.feed.tick(loop.time())
                for fetch in self._take(record, effects):
                    task = asyncio.create_task(self._fetch(record, fetch.number))
                    fetches.add(task)
                    task.add_done_callback(fetches.discard)
        finally:
            for task in fetches:
                task.cancel()
            socket.close(0)

    async def _fetch(self, record: PodRecord, number: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            snapshot = await self._client.snapshot(record.endpoint)
        except _CALL_ERRORS:
            record.feed.snapshot_failed(number, loop.time())
            return
        for fetch in self._take(record, record.feed.snapshot(number, snapshot, loop.time())):
            # The stream has gone on past a hole: the next tick or message asks again.
            record.feed.snapshot_failed(fetch.number, loop.time())

    def _take(self, record: PodRecord, effects: list[FeedEffect]) -> list[FetchSnapshot]:
        return self._pool.apply(record.name, effects)

    def _count_rejoins(self, before: dict[str, int], after: dict[str, int]) -> None:
        for reason, count in after.items():
            if count != before[reason]:
                self._metrics.rejoins.labels(reason).inc(count - before[reason])


async def _logged(watch: Callable[[PodRecord], Coroutine[None, None, None]], record: PodRecord) -> None:
    """A watcher that dies of a bug must not do so in silence."""
    try:
        await watch(record)
    except asyncio.CancelledError:
        raise
    except Exception:
        _log.exception("a pod's watcher failed", extra=logs.fields(pod=record.name))
        raise
