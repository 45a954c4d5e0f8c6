"""The watch layer: kopf as an informer, in a thread and an event loop of its own.

Only ``on.event`` handlers are registered, which keep no state in objects: kopf writes nothing, no annotation and no
finalizer. Its indices are not used: their barrier at the start keeps every object of the first lists in memory at once.
When everything has been seen is told by ``streams`` instead. A watcher that dies ends kopf, and with it this process.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import kopf

from kvferry_operator.plan.manifests.meta import MANAGED_BY, Object
from kvferry_operator.shell import connection
from kvferry_operator.shell.clock import Clock
from kvferry_operator.shell.kinds import Kind
from kvferry_operator.shell.streams import Stream
from kvferry_service import logs

SERVER_TIMEOUT_S = 300  # of one watch request
INACTIVITY_S = 70.0  # without even a bookmark: the connection is dead
CONNECT_S, REQUEST_S = 5.0, 30.0
CHUNK = 100  # objects of one list request: with what becomes of them in memory, they are what a start costs
RECONNECT_S = 1.0
IDLE_S = 0.1  # after which kopf forgets the queue of an object
BEAT_S = 1.0
SILENT_S = SERVER_TIMEOUT_S + 2 * REQUEST_S  # a watch that lives has asked again by then
_log = logs.get_logger(__name__)


class Handlers:
    """What the watch layer calls, from its own thread."""

    def __init__(
        self,
        *,
        seen: Callable[[Object, bool], None],
        gone: Callable[[Object], None],
        requested: Callable[[Stream, bool, bool], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self.seen = seen  # an object as it is now; whether it comes from a list
        self.gone = gone
        self.requested = requested  # stream, is a watch, is a further part of a list
        self.ended = ended


class Watch:
    """Watches kinds in namespaces (``None``: in all) from ``start`` to ``stop``."""

    def __init__(
        self, kinds: tuple[Kind, ...], namespaces: tuple[str, ...] | None, handlers: Handlers, clock: Clock
    ) -> None:
        self._kinds = kinds
        self._namespaces = namespaces
        self._handlers = handlers
        self._clock = clock
        self._plurals = {(kind.group, kind.version, kind.plural): kind for kind in kinds}
        self._thread = threading.Thread(target=self._main, name="watch", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stopped = False
        self.beat_at = clock()  # when its loop last turned

    def streams(self) -> tuple[Stream, ...]:
        """All watches: each kind in each namespace."""
        spaces: tuple[str | None, ...] = (None,) if self._namespaces is None else self._namespaces
        return tuple((kind.kind, space) for kind in self._kinds for space in spaces)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end; it does within seconds, and nobody needs to wait for that."""
        self._stopped = True
        if self._loop is not None and self._stop is not None:
            try:
                self._loop.call_soon_threadsafe(self._stop.set)
            except RuntimeError:
                pass  # it has ended already

    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # ---- in its thread

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._body())
        except BaseException as caught:  # noqa: BLE001 - the thread's edge: told to the process, which ends
            error = caught
        self._handlers.ended(error)

    async def _body(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._stopped:
            return
        beat = asyncio.create_task(self._beat())
        try:
            await kopf.operator(
                registry=self._registry(),
                settings=_settings(self._kinds),
                clusterwide=self._namespaces is None,
                namespaces=self._namespaces or (),
                standalone=True,
                stop_flag=self._stop,
                identity=None,
            )
        finally:
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            self.beat_at = self._clock()
            await asyncio.sleep(BEAT_S)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.AiohttpSession:
            settings = await connection.load()
            made = connection.session(settings, [self._trace()])
            return kopf.AiohttpSession(server=settings.host, aiohttp_session=made)

        kopf.on.login(registry=registry, errors=kopf.ErrorsMode.PERMANENT)(login)
        for kind in self._kinds:
            self._register(registry, kind)
        return registry

    def _register(self, registry: kopf.OperatorRegistry, kind: Kind) -> None:
        async def event(event: Any, **_: Any) -> None:
            found = {"apiVersion": kind.api_version, "kind": kind.kind, **event["object"]}
            if event["type"] == "DELETED":
                self._handlers.gone(found)
            else:
                self._handlers.seen(found, event["type"] is None)

        kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)(event)

    def _trace(self) -> aiohttp.TraceConfig:
        trace = aiohttp.TraceConfig()

        async def begins(_: Any, __: Any, params: aiohttp.TraceRequestStartParams) -> None:
            stream = stream_of(params.url.path, self._plurals)
            if stream is not None:
                query = params.url.query
                self._handlers.requested(stream, query.get("watch") == "true", "continue" in query)

        trace.on_request_start.append(begins)
        return trace


def stream_of(path: str, plurals: dict[tuple[str, str, str], Kind]) -> Stream | None:
    """The watch that a request's path belongs to: /api/v1/pods, /apis/GROUP/VERSION/namespaces/NAME/PLURAL."""
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        parts.insert(1, "")
    if len(parts) not in (4, 6) or (len(parts) == 6 and parts[3] != "namespaces"):
        return None
    kind = plurals.get((parts[1], parts[2], parts[-1]))
    return None if kind is None else (kind.kind, parts[4] if len(parts) == 6 else None)


class _NoEssence(kopf.DiffBaseStorage):
    """kopf compares nothing: it would copy each object three times to learn what no handler here asks for."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise RuntimeError("there is nothing to keep in objects")


class _Backoffs:
    """Seconds between attempts of one request, without end: an API server that is away comes back."""

    def __iter__(self) -> Iterator[float]:
        yield from (1.0, 1.0, 2.0, 3.0, 5.0)
        while True:
            yield 8.0


def _settings(kinds: tuple[Kind, ...]) -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.persistence.diffbase_storage = _NoEssence()
    made.scanning.disabled = True
    made.process.ultimate_exiting_timeout = None
    made.watching.server_timeout = SERVER_TIMEOUT_S
    made.watching.connect_timeout = CONNECT_S
    made.watching.inactivity_timeout = INACTIVITY_S
    made.watching.reconnect_backoff = RECONNECT_S
    made.watching.chunk_size = CHUNK
    made.queueing.idle_timeout = IDLE_S
    made.networking.request_timeout = REQUEST_S
    made.networking.connect_timeout = CONNECT_S
    made.networking.error_backoffs = _Backoffs()
    for kind in kinds:
        if kind.ours:
            made.watching.label_selectors[kind.group, kind.version, kind.plural] = f"{MANAGED_BY}=kvferry"
    return made
