"""Discovery in a cluster: the EndpointSlices of the pools' Services, listed once and watched from then on.

While the API server is away the pods known stay: whether each of them would answer is asked of itself anyway.
"""

import asyncio
from dataclasses import dataclass
from random import Random
from typing import assert_never

from kvferry_router.discovery.api_server import ApiFailure, ApiServer
from kvferry_router.discovery.endpoints import Endpoint, Take
from kvferry_router.discovery.list_watch import ListNow, ListWatch, PauseUntil, Phase, WatchFrom
from kvferry_router.discovery.slice_events import (
    Bookmark,
    Broken,
    Changed,
    Deleted,
    Expired,
    UnreadableError,
    read_event,
    read_list,
)
from kvferry_router.discovery.slices import LEFT_OUT, SERVICE_LABEL, PoolSlices
from kvferry_router.metrics import RouterMetrics
from kvferry_service import logs
from kvferry_wire.limits import Limits
from kvferry_wire.pod import Role

_LOOK_S = 0.5  # while pausing: whether the API server counts as away by now
_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PoolServices:
    """The headless Services of a service's pools."""

    namespace: str
    prefill: str
    decode: str

    def roles(self) -> dict[str, Role]:
        return {self.prefill: "prefill", self.decode: "decode"}

    def path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"

    def query(self) -> dict[str, str]:
        return {"labelSelector": f"{SERVICE_LABEL} in ({self.decode},{self.prefill})"}


class ClusterPods:
    """The pods of the pools, as the API server tells. For one event loop."""

    def __init__(
        self,
        api: ApiServer,
        services: PoolServices,
        *,
        family: int,
        limits: Limits,
        metrics: RouterMetrics,
        rng: Random,
    ) -> None:
        """``family``: 4 or 6, of which a pod's address is taken where it has both."""
        self._api = api
        self._services = services
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._slices = PoolSlices(services.namespace, services.roles(), family=family, max_pods=limits.pods)
        self._flow = ListWatch(limits, rng, self._loop.time())
        self._listed = False
        self._failure = ""  # the kind of the last one, since the API server's last word
        self._away = False
        self._told: tuple[Endpoint, ...] | None = None
        self._left_out: dict[str, int] = {}
        metrics.discovery_silence.set_function(lambda: self._flow.silence(self._loop.time()))

    def why_unknown(self) -> str:
        """Why the pods are not known yet; empty once they are, and while the API server is away afterwards."""
        if self._listed:
            return ""
        return "the API server has not told of any pods yet" + (f" ({self._failure})" if self._failure else "")

    def current(self) -> bool:
        """Whether the API server is there to tell of changes."""
        return self._listed and not self._away

    async def follow(self, take: Take) -> None:
        """Tell of all pods, at first and at each change, until cancelled."""
        while True:
            step = self._flow.step(self._loop.time())
            try:
                match step:
                    case ListNow():
                        await self._list()
                    case WatchFrom():
                        await self._watch(step, take)
                    case PauseUntil(at):
                        await self._pause(at, take)
                    case _:
                        assert_never(step)
            except ApiFailure as failure:
                self._failed(failure)
            self._tell(take)

    async def _list(self) -> None:
        body = await self._api.get_list(self._services.path(), self._services.query())
        try:
            found = read_list(body)
        except UnreadableError as error:
            raise ApiFailure("protocol", str(error)) from None
        self._flow.listed(found.version, self._loop.time())
        self._slices.replace(found.slices)
        self._listed, self._failure = True, ""
        _log.info("EndpointSlices listed", extra=logs.fields(slices=len(self._slices), version=found.version))

    async def _watch(self, step: WatchFrom, take: Take) -> None:
        query = {**self._services.query(), "resourceVersion": step.version}
        async with self._api.watch(self._services.path(), query, step.seconds) as stream:
            self._flow.opened(self._loop.time())
            self._tell(take)
            while (lines := await stream.read()) is not None:
                for line in lines:
                    self._apply(line)
                self._failure = ""
                self._tell(take)
        self._flow.ended(self._loop.time())

    def _apply(self, line: bytes) -> None:
        """Take one event. Raises ``ApiFailure`` when it ends the watch."""
        try:
            event = read_event(line)
        except UnreadableError as error:
            raise ApiFailure("protocol", str(error)) from None
        match event:
            case Changed():
                self._slices.put(event.slice)
            case Deleted():
                self._slices.remove(event.name)
            case Bookmark():
                pass
            case Expired():
                raise ApiFailure("gone", event.told)
            case Broken():
                raise ApiFailure("status", event.told, retry_after_s=event.retry_after_s)
            case _:
                assert_never(event)
        self._flow.word(event.version, self._loop.time())

    async def _pause(self, at: float, take: Take) -> None:
        while (left := at - self._loop.time()) > 0:
            await asyncio.sleep(min(left, _LOOK_S))
            self._tell(take)
        self._flow.due()

    def _failed(self, failure: ApiFailure) -> None:
        now = self._loop.time()
        if self._flow.phase is Phase.WATCHING and failure.reason in ("gone", "protocol"):
            self._flow.gone(now)  # what the watch said is lost: only a list tells what is there now
        else:
            self._flow.failed(now, failure.retry_after_s)
        self._metrics.discovery_failures.labels(failure.reason).inc()
        if failure.reason == "silent":
            return  # some API servers say nothing where nothing happens; whether this one is there is seen next
        if self._failure != failure.reason:  # told once, not at each try
            _log.warning("the API server cannot be asked", extra=logs.fields(kind=failure.reason, reason=str(failure)))
        self._failure = failure.reason

    def _tell(self, take: Take) -> None:
        """Hand on what is new: pods, and whether the API server can be believed on their readiness."""
        away = self._flow.away(self._loop.time())
        if away != self._away:
            self._away = away
            pods = len(self._told or ())
            if away:
                _log.error("the API server is away: the pods known stay", extra=logs.fields(pods=pods))
            else:
                _log.info("the API server is back", extra=logs.fields(pods=pods))
        if not self._listed:
            return
        found = self._slices.members(current=not away)
        left_out = dict(self._slices.left_out)
        for reason in LEFT_OUT:
            self._metrics.discovery_left_out.labels(reason).set(left_out.get(reason, 0))
        if left_out != self._left_out:
            self._left_out = left_out
            if any(left_out.values()):
                _log.warning("endpoints are left out", extra=logs.fields(**left_out))
        if found != self._told:
            self._told = found
            take(found)
