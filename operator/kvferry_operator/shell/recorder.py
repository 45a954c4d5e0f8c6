"""Events about services, as `kubectl describe` shows them.

The same thing said again within ``SERIES_S`` is counted on the Event that is there; a service gets a few Events at
once and one each ``REFILL_S`` after that; nothing waits for an Event, and one that cannot be written is dropped and
counted. ``EventLog`` decides and is pure.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvferry_operator.plan.events import Event
from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.shell.api import Api, ApiError, FencedError
from kvferry_operator.shell.clock import Clock
from kvferry_operator.shell.kinds import EVENT
from kvferry_service import logs

SERIES_S = 600.0
BURST, REFILL_S = 10, 30.0
KNOWN = 4096  # services and series that are remembered
PENDING = 512  # Events that wait to be written
NOTE_CHARS = 1000
COMPONENT = "kvferry-operator"
_log = logs.get_logger(__name__)


class NewEvent(msgspec.Struct, frozen=True):
    """Write a new Event of this name."""

    name: str


class MoreOf(msgspec.Struct, frozen=True):
    """Count this one on the Event of this name."""

    name: str
    count: int


class _Series(msgspec.Struct):
    name: str
    count: int
    last: float


class EventLog:
    """Which Events are written, and which are counted on others. ``unique`` makes parts of names."""

    def __init__(self, unique: Callable[[], str]) -> None:
        self._unique = unique
        self._series: OrderedDict[tuple[str, str, str], _Series] = OrderedDict()
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # uid -> (tokens, at)

    def next(self, service: str, uid: str, event: Event, now: float) -> NewEvent | MoreOf | None:
        """What to do about an event of a service; ``None`` where it has had too many."""
        if not self._allowed(uid, now):
            return None
        key = (uid, event.type, event.reason + "\0" + event.message)
        series = self._series.get(key)
        if series is not None and now < series.last + SERIES_S:
            series.count, series.last = series.count + 1, now
            self._series.move_to_end(key)
            return MoreOf(series.name, series.count)
        name = f"{service[:200]}.{self._unique()}"
        self._series[key] = _Series(name, 1, now)
        _bounded(self._series)
        return NewEvent(name)

    def _allowed(self, uid: str, now: float) -> bool:
        tokens, at = self._tokens.pop(uid, (float(BURST), now))
        tokens = min(float(BURST), tokens + max(0.0, now - at) / REFILL_S)
        allowed = tokens >= 1.0
        self._tokens[uid] = (tokens - 1.0 if allowed else tokens, now)
        _bounded(self._tokens)
        return allowed


def _bounded(known: "OrderedDict[Any, Any]") -> None:
    if len(known) > KNOWN:
        known.popitem(last=False)


class Recorder:
    """Writes Events, one after another, in the background."""

    def __init__(
        self,
        api: Api,
        log: EventLog,
        *,
        instance: str,
        clock: Clock,
        stamp: Callable[[], str],
        dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self._api = api
        self._log = log
        self._instance = instance
        self._clock = clock
        self._stamp = stamp
        self._dropped = dropped
        self._queue: asyncio.Queue[tuple[Object, Event]] = asyncio.Queue(PENDING)

    def record(self, found: Object, events: Sequence[Event]) -> None:
        """Take Events about a service; those that there is no room for are dropped."""
        for event in events:
            try:
                self._queue.put_nowait((found, event))
            except asyncio.QueueFull:
                self._dropped()

    async def run(self) -> None:
        """Write what comes, until cancelled."""
        while True:
            found, event = await self._queue.get()
            await self.write(found, event)

    async def flush(self) -> None:
        """Write what waits."""
        while not self._queue.empty():
            await self.write(*self._queue.get_nowait())

    async def write(self, found: Object, event: Event) -> None:
        """Write one; a failure is logged and dropped."""
        metadata = found["metadata"]
        todo = self._log.next(metadata["name"], metadata["uid"], event, self._clock())
        if todo is None:
            self._dropped()
            return
        try:
            if isinstance(todo, NewEvent):
                await self._api.create(EVENT, self._body(todo.name, found, event), COMPONENT)
            else:
                series = {"series": {"count": todo.count, "lastObservedTime": self._stamp()}}
                await self._api.merge(EVENT, metadata["namespace"], todo.name, series, COMPONENT)
        except (ApiError, FencedError) as error:
            self._dropped()
            _log.warning("an Event was not written", extra=logs.fields(name=todo.name, reason=str(error)))

    def _body(self, name: str, found: Object, event: Event) -> Object:
        metadata = found["metadata"]
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "eventTime": self._stamp(),
            "reportingController": "serving.kvferry.dev/operator",
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "type": event.type,
            "reason": event.reason,
            "note": event.message[:NOTE_CHARS],
            "regarding": {
                "apiVersion": found["apiVersion"],
                "kind": found["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion", ""),
            },
        }
