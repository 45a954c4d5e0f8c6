"""The API as a port over the cluster in memory, with faults on demand."""

from collections.abc import Callable

from kvferry_operator.plan.effects import Apply, Create, Delete, Patch
from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.shell import clock
from kvferry_operator.shell.api import ApiError
from kvferry_operator.shell.cache import ObjectCache
from kvferry_operator.shell.kinds import EVENT, POD, SERVICE, Kind
from kvferry_operator.shell.reconcile import Reconciler
from kvferry_operator.shell.recorder import EventLog, Recorder
from tests.operator.cluster import SETTINGS
from tests.operator.fake_cluster import FakeCluster

Refuse = Callable[[str, str, str], ApiError | None]  # verb, kind, name


class FakeApi:
    """Calls on a ``FakeCluster``. ``refuse`` says which fail; ``done_first``: after they were done."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.refuse: Refuse = lambda verb, kind, name: None
        self.done_first = False
        self.calls: list[tuple[str, str, str]] = []
        self.events: list[Object] = []
        self._version = 100

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self._call("get", kind.kind, name)
        found = self.cluster.objects.get((kind.kind, name))
        return None if found is None else self._answer(found)

    async def served(self, api_version: str) -> frozenset[str]:
        return frozenset({"InferenceService", "InferenceServiceRole"})

    async def create(self, kind: Kind, body: Object, manager: str) -> Object:
        name = body["metadata"]["name"]
        if kind is EVENT:
            self._call("create", kind.kind, name)
            self.events.append(body)
            return body
        there = (kind.kind, name) in self.cluster.objects
        self._change("create", kind.kind, name, lambda: self.cluster.perform(Create(object=body, manager=manager)))
        if there:
            raise ApiError(409, "already exists", reason="AlreadyExists")
        return self._answer(self.cluster.objects[kind.kind, name])

    async def apply(self, kind: Kind, body: Object, manager: str, sub: str = "") -> Object:
        name = body["metadata"]["name"]
        if sub:
            self._call(f"apply {sub}", kind.kind, name)
            found = self.cluster.found if kind is SERVICE else self.cluster.objects[kind.kind, name]
            found["status"] = body["status"]
            return self._answer(found)
        self._change(
            "apply", kind.kind, name, lambda: self.cluster.perform(Apply(object=body, manager=manager, why=""))
        )
        return self._answer(self.cluster.objects[kind.kind, name])

    async def merge(self, kind: Kind, namespace: str, name: str, body: Object, manager: str) -> Object:
        if kind is EVENT:
            self._call("merge", kind.kind, name)
            return {}
        patch = Patch(
            api_version=kind.api_version,
            kind=kind.kind,
            namespace=namespace,
            name=name,
            body=body,
            manager=manager,
            why="",
        )
        self._change("merge", kind.kind, name, lambda: self.cluster.perform(patch))
        if (kind.kind, name) not in self.cluster.objects:
            raise ApiError(404, "not found")
        return self._answer(self.cluster.objects[kind.kind, name])

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        effect = Delete(api_version=kind.api_version, kind=kind.kind, namespace=namespace, name=name, uid=uid, why="")
        self._change("delete", kind.kind, name, lambda: self.cluster.perform(effect))

    async def replace(self, kind: Kind, body: Object, *, timeout_s: float) -> Object:
        raise NotImplementedError

    async def start(self, kind: Kind, body: Object, *, timeout_s: float) -> Object:
        raise NotImplementedError

    # ---- inside

    def _call(self, verb: str, kind: str, name: str) -> None:
        self.calls.append((verb, kind, name))
        error = self.refuse(verb, kind, name)
        if error is not None:
            raise error

    def _change(self, verb: str, kind: str, name: str, do: Callable[[], None]) -> None:
        self.calls.append((verb, kind, name))
        error = self.refuse(verb, kind, name)
        if error is None or self.done_first:
            do()
        if error is not None:
            raise error

    def _answer(self, found: Object) -> Object:
        """An object as a server answers with it: with a version, newer than all before."""
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        found["metadata"].setdefault("namespace", "ns")
        return found


class Rig:
    """A reconciler over a fake API, with a cache that is filled as watches would fill it."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.api = FakeApi(cluster)
        self.cache = ObjectCache()
        self.now = 1000.0
        log = EventLog(lambda: str(len(self.api.events)))
        self.recorder = Recorder(self.api, log, instance="me", clock=lambda: self.now, stamp=clock.stamp)
        self.reconciler = Reconciler(
            api=self.api,
            cache=self.cache,
            settings=SETTINGS,
            recorder=self.recorder,
            clock=lambda: self.now,
            stamp=clock.stamp,
        )

    def watch(self) -> None:
        """Show everything as it is now."""
        self.cache.put(self.api._answer(self.cluster.found))
        shown = {("InferenceService", "ns", self.cluster.found["metadata"]["name"])}
        pods = [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in self.cluster.pods.values()]
        for found in (*self.cluster.objects.values(), *pods):
            if found["kind"] != "Secret":
                self.cache.put(self.api._answer(found))
                shown.add((found["kind"], "ns", found["metadata"]["name"]))
        for kind in {ref[0] for ref in self.cache._entries} | {POD.kind}:
            for ref in self.cache.refs(kind, "ns"):
                if ref not in shown:
                    self.cache.forget(ref)
