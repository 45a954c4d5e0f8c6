"""A cluster in memory: keeps objects as an API server does, and runs Deployments as their controller does."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

from kvferry_operator.plan.decide import Decision, decide
from kvferry_operator.plan.effects import Apply, ApplyFault, Create, Delete, Effect, Patch
from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.plan.observed import Seen
from tests.operator.cluster import KEYS, NOW, SETTINGS

Key = tuple[str, str]
Ready = Callable[[Object], bool]


class FakeCluster:
    """One namespace. ``ready`` says which pods become ready, ``room`` how many pods there is room for."""

    def __init__(self, found: Object, ready: Ready = lambda pod: True) -> None:
        self.found = found
        self.ready = ready
        self.room = 1000
        self.objects: dict[Key, Object] = {}
        self.pods: dict[str, Object] = {}
        self.log: list[Effect] = []
        self.deleted_pods: list[str] = []
        self.refuse: Callable[[Effect], ApplyFault | None] = lambda effect: None
        self._faults: tuple[ApplyFault, ...] = ()
        self._applied: dict[Key, Object] = {}
        self._numbers = itertools.count(1)

    # ---- the operator's side

    def seen(self) -> Seen:
        visible = tuple(child for (kind, _), child in self.objects.items() if kind != "Secret")
        return Seen(children=visible, pods=tuple(self.pods.values()), faults=self._faults)

    def decide(self) -> Decision:
        return decide(copy.deepcopy(self.found), self.seen(), SETTINGS, KEYS if self._keyless() else None, NOW)

    def _keyless(self) -> bool:
        return not any(kind == "Secret" for kind, _ in self.objects)

    def reconcile(self, most: int | None = None) -> Decision:
        """One pass of the shell: decide, perform (the first ``most`` effects), write the status."""
        decision = self.decide()
        faults = []
        for effect in decision.effects[:most]:
            fault = self.refuse(effect)
            if fault is None:
                self.perform(effect)
            else:
                faults.append(fault)
        self._faults = tuple(faults)
        if most is None and decision.status is not None:
            self.found["status"] = copy.deepcopy(decision.status)
            for name, told in decision.role_statuses.items():
                self.objects["InferenceServiceRole", name]["status"] = told
        return decision

    def settle(self, rounds: int = 60, watch: Callable[[], None] = lambda: None) -> int:
        """Reconcile and run until nothing changes; returns the rounds it took."""
        for number in range(rounds):
            before = self.snapshot()
            decision = self.reconcile()
            watch()
            self.run()
            watch()
            if not decision.effects and self.snapshot() == before and not self.decide().effects:
                return number
        raise AssertionError(f"no rest after {rounds} rounds: {self.decide().effects}")

    def snapshot(self) -> Any:
        """All that matters of the objects, for comparing two ends."""
        bare = {key: {k: v for k, v in child.items() if k != "status"} for key, child in self.objects.items()}
        for child in bare.values():
            child["metadata"] = {k: v for k, v in child["metadata"].items() if k not in ("uid", "generation")}
        return copy.deepcopy(
            (bare, self.found.get("status"), sorted(pod["metadata"]["name"] for pod in self.pods.values()))
        )

    # ---- the API server's side

    def perform(self, effect: Effect) -> None:
        self.log.append(effect)
        if isinstance(effect, Create):
            self._create(effect.object)
        elif isinstance(effect, Apply):
            self._apply(effect.object)
        elif isinstance(effect, Patch):
            if (there := self.objects.get((effect.kind, effect.name))) is not None:
                self._changed(there, lambda: _merge(there, effect.body))
        elif isinstance(effect, Delete):
            there = self.objects.get((effect.kind, effect.name))
            if there is not None and there["metadata"]["uid"] == effect.uid:
                del self.objects[effect.kind, effect.name]
                self._applied.pop((effect.kind, effect.name), None)

    def _create(self, wanted: Object) -> None:
        key = (wanted["kind"], wanted["metadata"]["name"])
        if key not in self.objects:
            made = copy.deepcopy(wanted)
            made["metadata"] |= {"uid": f"uid-{next(self._numbers)}", "generation": 1}
            self.objects[key] = made

    def _apply(self, wanted: Object) -> None:
        key = (wanted["kind"], wanted["metadata"]["name"])
        self._create(wanted)
        there = self.objects[key]
        last = self._applied.get(key, {})

        def change() -> None:
            _remove(there, last, wanted)
            _merge(there, copy.deepcopy(wanted))

        self._changed(there, change)
        self._applied[key] = copy.deepcopy(wanted)

    @staticmethod
    def _changed(there: Object, change: Callable[[], None]) -> None:
        spec = copy.deepcopy(there.get("spec"))
        change()
        if there.get("spec") != spec:
            there["metadata"]["generation"] += 1

    # ---- the controllers' side

    def run(self) -> None:
        """Deployments make and remove pods; what may become ready does."""
        live = {child["metadata"]["uid"]: child for (kind, _), child in self.objects.items() if kind == "Deployment"}
        for name, pod in list(self.pods.items()):
            if pod["owner"] not in live:
                self._end(name)
        for uid, deployment in live.items():
            self._run(uid, deployment)

    def _run(self, uid: str, deployment: Object) -> None:
        template, wanted = deployment["spec"]["template"], deployment["spec"]["replicas"]
        mine = [name for name, pod in self.pods.items() if pod["owner"] == uid]
        stale = [name for name in mine if self.pods[name]["template"] != template]
        # One at a time, the new before the old: as maxSurge 1 and maxUnavailable 0 say.
        room = self.room - len(self.pods)
        for _ in range(min(max(0, wanted - (len(mine) - len(stale))), room) if not stale else min(1, room)):
            self._start(uid, deployment, template)
        for name in [name for name, pod in self.pods.items() if pod["owner"] == uid]:
            pod = self.pods[name]
            up = self.ready(pod)
            pod["status"]["conditions"] = [{"type": "Ready", "status": "True" if up else "False"}]
            pod["status"]["containerStatuses"][0] |= {"ready": up, "started": up}
        fresh = [n for n, pod in self.pods.items() if pod["owner"] == uid and n not in stale and self.ready(pod)]
        for name in (stale if fresh else [])[:1]:
            self._end(name)
        mine = [name for name, pod in self.pods.items() if pod["owner"] == uid]
        by_worth = sorted(mine, key=lambda name: (not self.ready(self.pods[name]), name in stale))
        for name in by_worth[max(wanted, len(stale)) :]:
            self._end(name)
        left = [self.pods[name] for name, pod in self.pods.items() if pod["owner"] == uid]
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(left),
            "updatedReplicas": sum(pod["template"] == template for pod in left),
            "readyReplicas": sum(self.ready(pod) for pod in left),
        }

    def _start(self, uid: str, deployment: Object, template: Object) -> None:
        name = f"{deployment['metadata']['name']}-{next(self._numbers)}"
        container = template["spec"]["containers"][0]["name"]
        self.pods[name] = {
            "owner": uid,
            "template": copy.deepcopy(template),
            "metadata": {"name": name, "labels": dict(template["metadata"]["labels"])},
            "spec": copy.deepcopy(template["spec"]),
            "status": {
                "phase": "Running",
                "conditions": [],
                "containerStatuses": [{"name": container, "state": {"running": {}}, "restartCount": 0}],
            },
        }

    def _end(self, name: str) -> None:
        del self.pods[name]
        self.deleted_pods.append(name)


def _merge(there: Object, wanted: Object) -> None:
    """JSON merge patch; also how an apply lays its fields over what is there, lists as a whole."""
    for key, value in wanted.items():
        if value is None:
            there.pop(key, None)
        elif isinstance(value, dict) and isinstance(there.get(key), dict):
            _merge(there[key], value)
        else:
            there[key] = value


def _remove(there: Object, last: Object, wanted: Object) -> None:
    """Take away what the last apply had and this one has not."""
    for key, value in last.items():
        if key not in wanted:
            there.pop(key, None)
        elif isinstance(value, dict) and isinstance(wanted[key], dict) and isinstance(there.get(key), dict):
            _remove(there[key], value, wanted[key])
