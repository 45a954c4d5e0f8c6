"""Lives of an operator in this process: each begins with nothing but what the API server has, and may end anywhere.

The watch layer is left out: a life lists what it sees, runs passes until nothing changes, and is thrown away. What
stands between it and the API server can end it before or after any call.
"""

from typing import Any

from kubernetes.aio.client import ApiClient

from kvferry_operator.plan.manifests.meta import MANAGED_BY, Object
from kvferry_operator.plan.manifests.settings import decode_settings
from kvferry_operator.shell import clock
from kvferry_operator.shell.api import Api, ApiError, KubeApi
from kvferry_operator.shell.cache import ObjectCache, Ref, ref_of
from kvferry_operator.shell.kinds import Kind, watched
from kvferry_operator.shell.reconcile import Reconciler
from kvferry_operator.shell.recorder import EventLog, Recorder
from tests.apiserver.operator.controllers import Controllers
from tests.apiserver.operator.install import Installation

MOST_ROUNDS = 80


class Crash(BaseException):
    """The process ends here."""


class Meddler:
    """Stands before the API. Counts calls that change something; ends the process at one, or loses its answer.

    Args:
        at: number of the call, from 1; 0: never.
        when: ``before`` it is sent, ``after`` it was done, or ``lost``: done, but the answer never comes.
    """

    def __init__(self, api: Api, at: int = 0, when: str = "before") -> None:
        self._api = api
        self._at = at
        self._when = when
        self.calls: list[str] = []  # that changed something: verb and kind
        self.looks = 0

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self.looks += 1
        return await self._api.get(kind, namespace, name)

    async def served(self, api_version: str) -> frozenset[str]:
        return await self._api.served(api_version)

    async def create(self, kind: Kind, body: Object, manager: str) -> Object:
        return await self._meddled(f"create {kind.kind}", self._api.create, kind, body, manager)

    async def apply(self, kind: Kind, body: Object, manager: str, sub: str = "") -> Object:
        return await self._meddled(f"apply {kind.kind} {sub}", self._api.apply, kind, body, manager, sub)

    async def merge(self, kind: Kind, namespace: str, name: str, body: Object, manager: str) -> Object:
        return await self._meddled(f"merge {kind.kind}", self._api.merge, kind, namespace, name, body, manager)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        await self._meddled(f"delete {kind.kind}", self._api.delete, kind, namespace, name, uid)

    async def replace(self, kind: Kind, body: Object, *, timeout_s: float) -> Object:
        return await self._api.replace(kind, body, timeout_s=timeout_s)

    async def start(self, kind: Kind, body: Object, *, timeout_s: float) -> Object:
        return await self._api.start(kind, body, timeout_s=timeout_s)

    async def _meddled(self, what: str, call: Any, *arguments: Any) -> Any:
        self.calls.append(what.strip())
        hit = len(self.calls) == self._at
        if hit and self._when == "before":
            raise Crash(what)
        done = await call(*arguments)
        if hit and self._when == "after":
            raise Crash(what)
        if hit:
            raise ApiError(0, "the answer was lost")
        return done


class Life:
    """One life in one namespace."""

    def __init__(
        self, installation: Installation, client: ApiClient, namespace: str, *, at: int = 0, when: str = "before"
    ) -> None:
        self.settings = decode_settings(installation.settings.read_bytes())
        self.api = Meddler(KubeApi(client, lambda: 60.0), at, when)
        self.cache = ObjectCache()
        self.recorder = Recorder(
            self.api, EventLog(lambda: clock.micro_stamp().replace(":", "").lower()), instance="life",
            clock=clock.now, stamp=clock.micro_stamp,
        )  # fmt: skip
        self.reconciler = Reconciler(
            api=self.api,
            cache=self.cache,
            settings=self.settings,
            recorder=self.recorder,
            clock=clock.now,
            stamp=clock.stamp,
        )
        self._server = installation.server
        self._namespace = namespace

    def look(self) -> None:
        """See the namespace as the watches would show it."""
        shown: set[Ref] = set()
        for kind in watched(self.settings):
            query = {"labelSelector": f"{MANAGED_BY}=kvferry"} if kind.ours else {}
            for found in self._server.client.list(kind.api_version, kind.kind, self._namespace, **query):
                self.cache.put(found)
                shown.add(ref_of(found))
            for ref in self.cache.refs(kind.kind, self._namespace):
                if ref not in shown:
                    self.cache.forget(ref)

    async def settle(self, controllers: Controllers) -> int:
        """Passes and controllers in turn until neither changes anything; returns the number of rounds.

        Raises:
            Crash: the process ended where it was to.
            AssertionError: there is no end to it.
        """
        for number in range(MOST_ROUNDS):
            self.look()
            before = len(self.api.calls)
            outcomes = [await self.reconciler.run(key) for key in list(self.cache.services())]
            await self.recorder.flush()
            quiet = len(self.api.calls) == before and not any(outcome.failed for outcome in outcomes)
            if not controllers.step() and quiet:
                return number
        raise AssertionError(f"no rest after {MOST_ROUNDS} rounds; last calls: {self.api.calls[-10:]}")
