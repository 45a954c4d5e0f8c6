"""The operator's process: all parts put together, from the first candidate's look at the Lease to its release."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kubernetes.aio.client import ApiClient

from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.shell import clock, connection
from kvferry_operator.shell.api import Api, ApiError, FencedError, KubeApi
from kvferry_operator.shell.cache import ObjectCache, Ref, ServiceKey, concerns, ref_of
from kvferry_operator.shell.election import Election, LeaseTimes
from kvferry_operator.shell.kinds import HTTP_ROUTE, ROLE, SERVICE, kind_of, watched
from kvferry_operator.shell.lease import LeaseKeeper
from kvferry_operator.shell.metrics import OperatorMetrics
from kvferry_operator.shell.options import Options
from kvferry_operator.shell.queue import QueueLimits
from kvferry_operator.shell.reconcile import Reconciler
from kvferry_operator.shell.recorder import EventLog, Recorder
from kvferry_operator.shell.streams import Stream, Streams
from kvferry_operator.shell.watch import SILENT_S, Handlers, Watch
from kvferry_operator.shell.workers import Workers
from kvferry_service import auth, logs
from kvferry_service.health import add_health_routes
from kvferry_service.http_app import HttpServer, build_app, listen
from kvferry_service.metrics import add_metrics_route, make_registry
from kvferry_service.run import StopSignal
from kvferry_wire.limits import DEFAULT_LIMITS

DRAIN_S = 5.0  # for running passes when asked to stop
QUIET_S = 2.0  # after the last object of a new list, before what it did not show is looked up
TEND_S = 1.0
CRDS_S = 2.0  # between looks for the CRDs
BEGIN_S = 0.2  # between looks whether work may begin
SETTLED_S = 1.0  # after the last object of the first lists
LATELY_S = 60.0
CHANGED_KEYS = 100_000
OPTIONAL = frozenset({HTTP_ROUTE.kind})  # its CRD need not be installed
BEAT_LATE_S = 30.0
STUCK_S = 30.0
UNREACHED_S = 30.0
LOST = 1  # exit status: leadership lost, or a part died
Wrap = Callable[[Api], Api]
_log = logs.get_logger("kvferry_operator")


class Operator:
    """One process. ``wrap`` lets tests stand between the operator and its API."""

    def __init__(
        self,
        options: Options,
        client: ApiClient,
        *,
        times: LeaseTimes | None = None,
        limits: QueueLimits | None = None,
        wrap: Wrap = lambda api: api,
    ) -> None:
        self.options = options
        self.metrics = OperatorMetrics(make_registry())
        identity = f"{options.identity}_{secrets.token_hex(4)}"
        self.election = Election(identity, times or LeaseTimes(), clock.now())
        self.api = wrap(KubeApi(client, self._fence, self.metrics.called))
        self.cache = ObjectCache()
        self.recorder = Recorder(
            self.api,
            EventLog(lambda: secrets.token_hex(8)),
            instance=identity,
            clock=clock.now,
            stamp=clock.micro_stamp,
            dropped=self.metrics.events_dropped.inc,
        )
        self.reconciler = Reconciler(
            api=self.api,
            cache=self.cache,
            settings=options.settings,
            recorder=self.recorder,
            clock=clock.now,
            stamp=clock.stamp,
        )
        self.workers: Workers[ServiceKey] = Workers(
            self.reconciler.run, limits or QueueLimits(), clock.now, self.metrics.passed
        )
        self.keeper = LeaseKeeper(
            self.api,
            self.election,
            namespace=options.lease_namespace,
            name=options.lease_name,
            clock=clock.now,
        )
        self._loop = asyncio.get_running_loop()
        self._watch_ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._working = False
        self._changed_at: dict[ServiceKey, float] = {}  # while another one works
        self._told_missing = ""
        self.watch = Watch(watched(options.settings), options.namespaces, self._handlers(), clock.now)
        self.streams = Streams(self.watch.streams(), clock.now())
        self._measure()

    # ---- life

    async def run(self, stop: StopSignal) -> int:
        """Work until told to stop (0) or until leadership or a part is lost (1)."""
        keeping: asyncio.Task[Any] = asyncio.create_task(self.keeper.run(), name="lease")
        stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait(), name="stop")
        work: list[asyncio.Task[Any]] = []
        status = 0
        try:
            ends = (keeping, stopping)
            # Also who waits for the Lease watches: it can go on at once with what it knows.
            if await self._until(self._kinds_served, ends, CRDS_S):
                self.watch.start()
            if await self._until(self._may_begin, (*ends, self._watch_ended), BEGIN_S):
                work = self._begin()
                await asyncio.wait([*ends, self._watch_ended, *work], return_when=asyncio.FIRST_COMPLETED)
            status = self._ended(stopping, keeping, work)
        finally:
            await self._wind_up(work, keeping, stopping)
        _log.info("stopped", extra=logs.fields(why=stop.why or self.election.why))
        return status

    async def _until(
        self, true: Callable[[], Awaitable[bool]], ends: Sequence[asyncio.Future[Any]], every_s: float
    ) -> bool:
        """Wait for a condition; false if one of ``ends`` came first."""
        while not any(end.done() for end in ends):
            if await true():
                return True
            await asyncio.wait(ends, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
        return False

    async def _may_begin(self) -> bool:
        now = clock.now()
        return self.election.may_write(now) and self.streams.settled(now, SETTLED_S, OPTIONAL)

    def _begin(self) -> list[asyncio.Task[Any]]:
        """Look at every service once; first at those that changed lately: who led before may not have seen it."""
        self._working = True
        since = clock.now() - LATELY_S
        for key in self.cache.services():
            self.workers.add(key, urgent=self._changed_at.get(key, 0.0) > since)
        for key, at in self._changed_at.items():
            if at > since:
                self.workers.add(key)
        self._changed_at.clear()
        _log.info("begins to work", extra=logs.fields(services=len(self.workers.queue), objects=len(self.cache)))
        parts = (self.workers.run(), self.recorder.run(), self._tend())
        return [asyncio.create_task(part) for part in parts]

    def _ended(self, stopping: asyncio.Task[Any], keeping: asyncio.Task[Any], work: list[asyncio.Task[Any]]) -> int:
        """Say which part has ended first; the exit status."""
        if self._watch_ended.done():
            _log.error("the watches died", extra=logs.fields(reason=repr(self._watch_ended.result())))
            return LOST
        if keeping.done() or self.workers.fenced:
            why = keeping.result() if keeping.done() else "a write came after the Lease's time"
            _log.error("leadership lost", extra=logs.fields(why=why))
            return LOST
        for task in work:
            if task.done():
                _log.error("a part died", exc_info=task.exception())
                return LOST
        return 0 if stopping.done() else LOST

    async def _wind_up(
        self, work: list[asyncio.Task[Any]], keeping: asyncio.Task[Any], stopping: asyncio.Task[Any]
    ) -> None:
        """In order: take nothing new, end what runs, give the Lease away, end the watches."""
        self.workers.stop()
        if work and self.election.may_write(clock.now()):
            await asyncio.wait([work[0]], timeout=DRAIN_S)
            try:
                async with asyncio.timeout(1.0):
                    await self.recorder.flush()
            except TimeoutError:
                _log.warning("some Events were not written")
        ended = (*work, stopping, keeping)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        await self.keeper.release()
        self.watch.stop()

    async def _kinds_served(self) -> bool:
        """The watch layer looks only once which kinds there are: the CRDs must be there before."""
        needed = {SERVICE.kind, ROLE.kind}
        try:
            missing = ", ".join(sorted(needed - await self.api.served(SERVICE.api_version)))
        except ApiError as error:
            missing = str(error)
        if missing and missing != self._told_missing:
            _log.warning("waiting for the CRDs", extra=logs.fields(missing=missing))
        self._told_missing = missing
        return not missing

    async def _tend(self) -> None:
        """Look up what a new list did not show: it vanished, or lost our label, while a watch was broken."""
        doubtful: set[Ref] = set()
        while True:
            await asyncio.sleep(TEND_S)
            doubtful |= self._unshown()
            doubtful -= await self._look_up(sorted(doubtful))

    def _unshown(self) -> set[Ref]:
        """What lists that have ended since the last call did not show of what is known."""
        unshown: set[Ref] = set()
        for kind, namespace in self.streams.relisted(clock.now(), QUIET_S):
            known = {ref[1:] for ref in self.cache.refs(kind, namespace)}
            unshown |= {(kind, *where) for where in self.streams.doubtful((kind, namespace), known)}
        return unshown

    async def _look_up(self, refs: Sequence[Ref]) -> set[Ref]:
        """Take in what is there now; returns the objects that need not be looked up again."""
        seen: set[Ref] = set()
        for ref in refs:
            try:
                found = await self.api.get(kind_of(ref[0]), *ref[1:])
            except ApiError as error:
                _log.warning("a look failed", extra=logs.fields(kind=ref[0], name="/".join(ref[1:]), reason=str(error)))
                if error.passing:
                    break  # the next one would fare no better
                seen.add(ref)
                continue
            seen.add(ref)
            if found is None:
                self.metrics.vanished.inc()
                self._add(self.cache.forget(ref))
            else:
                self._add(self.cache.put(found))
        return seen

    # ---- what the watches tell, from their thread

    def _handlers(self) -> Handlers:
        def soon(act: Callable[..., None], *arguments: Any) -> None:
            try:
                self._loop.call_soon_threadsafe(act, *arguments)
            except RuntimeError:
                pass  # the loop is closed: the process is ending

        return Handlers(
            seen=lambda found, listing: soon(self._seen, found, listing),
            gone=lambda found: soon(self._gone, found),
            requested=lambda stream, watch, more: soon(self._requested, stream, watch, more),
            ended=lambda error: soon(self._watch_over, error),
        )

    def _seen(self, found: Object, listing: bool) -> None:
        ref = ref_of(found)
        self._heard(ref, listing)
        # What a list shows for the first time is there, and has not changed.
        news = not listing or self.cache.uid(ref) is not None
        keys = self.cache.put(found)
        if news or self._working:
            self._add(keys)

    def _gone(self, found: Object) -> None:
        self._heard(ref_of(found), False)
        self._add((*self.cache.remove(found), *concerns(found)))

    def _heard(self, ref: Ref, listing: bool) -> None:
        kind, namespace, name = ref
        space = None if self.options.namespaces is None else namespace
        self.streams.heard((kind, space), (namespace, name), listing=listing, now=clock.now())

    def _requested(self, stream: Stream, watch: bool, more: bool) -> None:
        self.metrics.requested(stream[0], watch)
        self.streams.requested(stream, watch=watch, more=more, now=clock.now())

    def _watch_over(self, error: BaseException | None) -> None:
        if not self._watch_ended.done():
            self._watch_ended.set_result(error)

    def _add(self, keys: tuple[ServiceKey, ...]) -> None:
        for key in dict.fromkeys(keys):
            if self._working:
                self.workers.add(key)
            elif len(self._changed_at) < CHANGED_KEYS or key in self._changed_at:
                self._changed_at[key] = clock.now()

    # ---- what it says of itself

    def _fence(self) -> float:
        now = clock.now()
        return self.election.holds_until - now if self.election.may_write(now) else 0.0

    def live(self) -> str:
        """Why this process should be started again; empty while it should not."""
        if not self.watch.alive():
            return "the watches have died" if self._watch_ended.done() else ""
        now = clock.now()
        if now - self.watch.beat_at > BEAT_LATE_S:
            return f"the watches' loop has stood still for {now - self.watch.beat_at:.0f} s"
        if silent := self.streams.silent(now, SILENT_S):
            return f"no word from the watch of {silent[0][0]} for more than {SILENT_S:.0f} s"
        if (stuck := self.workers.stuck_s()) > STUCK_S:
            return f"a pass is stuck {stuck:.0f} s beyond its deadline"
        return ""

    def ready(self) -> str:
        """Why this process would not do its work now, or, waiting, could not take over."""
        at = self.keeper.reached_at
        if at is None or clock.now() - at > UNREACHED_S:
            return "the Lease cannot be reached"
        if self._told_missing:
            return f"waits for the CRDs: {self._told_missing}"
        missing = {kind for kind, _ in self.streams.unlisted()} - OPTIONAL
        return f"not listed yet: {', '.join(sorted(missing))}" if missing else ""

    def _measure(self) -> None:
        measure, queue = self.metrics.measure, self.workers.queue
        measure("operator_leader", lambda: float(self.election.may_write(clock.now())))
        measure("operator_queue_waiting", lambda: float(queue.waiting(clock.now())))
        measure("operator_queue_running", lambda: float(queue.running()))
        measure("operator_queue_failing", lambda: float(queue.failing()))
        measure("operator_services", lambda: float(sum(1 for _ in self.cache.services())))
        measure("operator_objects", lambda: float(len(self.cache)))


async def serve(options: Options, stop: StopSignal, *, wrap: Wrap = lambda api: api) -> int:
    """Run an operator with its own port.

    Raises:
        connection.ConnectionSettingsError: there is no way to an API server.
        OSError: the port cannot be had.
    """
    settings = await connection.load()
    listener = listen(options.host, options.port)
    try:
        async with ApiClient(settings) as client:
            operator = Operator(options, client, wrap=wrap)
            app = build_app(DEFAULT_LIMITS, lambda _: None, open_routes=auth.OPEN_ROUTES)
            add_health_routes(app, live=operator.live, ready=operator.ready)
            add_metrics_route(app, operator.metrics.registry)
            server = HttpServer(app, DEFAULT_LIMITS, internal=False)
            await server.start(listener)
            _log.info(
                "operator started",
                extra=logs.fields(
                    identity=operator.election.identity,
                    port=listener.getsockname()[1],
                    namespaces="all" if options.namespaces is None else ",".join(options.namespaces),
                    api=settings.host,
                ),
            )
            try:
                return await operator.run(stop)
            finally:
                await server.close()
    finally:
        listener.close()


__all__ = ["FencedError", "Operator", "serve"]
