"""What a cluster does around the operator: Deployments get pods, pods get ready, orphans are collected.

There are no nodes: pods are objects whose status is written here. Deployments are run as ``maxSurge: 1,
maxUnavailable: 0`` says. Every pod that is ended is remembered, so that a test can tell a needless restart.
"""

import hashlib
import json
import threading
from collections.abc import Callable

from kvferry_operator.plan.manifests.meta import MANAGED_BY, Object
from kvferry_operator.shell.kinds import SECRET, SERVICE, watched
from tests.apiserver.operator.install import SETTINGS
from tests.operator.cluster import SETTINGS as ALL_KINDS
from tests.support.api_server import ApiServer
from tests.support.kube_client import Refused

TEMPLATE = "test/template"
OURS = f"{MANAGED_BY}=kvferry"
COLLECTED = tuple(
    kind for kind in (*watched(ALL_KINDS), SECRET) if kind not in (SERVICE,) and "gateway" not in kind.api_version
)
assert SETTINGS["ingresses"]


class Controllers:
    """The controllers of one namespace. ``ready`` says which pods become ready."""

    def __init__(self, server: ApiServer, namespace: str, ready: Callable[[Object], bool] = lambda pod: True) -> None:
        self.client = server.client
        self.namespace = namespace
        self.ready = ready
        self.ended: list[str] = []  # names of the Deployments whose pods were ended, one for each pod
        self._number = 0

    def step(self) -> bool:
        """One turn of all of them; whether anything changed."""
        deployments = {found["metadata"]["uid"]: found for found in self._list("apps/v1", "Deployment")}
        pods = self._list("v1", "Pod")
        changed = False
        for pod in pods:
            if owner_of(pod) not in deployments:
                self._end(pod)
                changed = True
        for uid, deployment in deployments.items():
            mine = [pod for pod in pods if owner_of(pod) == uid]
            changed = self._run(deployment, mine) or changed
        return changed

    def collect(self) -> int:
        """Delete what has an owner that does not exist any more; how many that were."""
        alive = {found["metadata"]["uid"] for found in self._list(SERVICE.api_version, SERVICE.kind)}
        alive |= {found["metadata"]["uid"] for found in self._list("apps/v1", "Deployment")}
        gone = 0
        for kind in COLLECTED:
            for found in self._list(kind.api_version, kind.kind):
                owners = {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}
                if owners and not owners & alive:
                    self.client.delete(found)
                    gone += 1
        return gone

    def running(self, stop: threading.Event, every_s: float = 0.1) -> threading.Thread:
        """Turn again and again in a thread, until told to stop."""

        def body() -> None:
            while not stop.wait(every_s):
                try:
                    self.step()
                    self.collect()
                except (OSError, Refused):
                    continue  # the server is away, or something changed at the same moment: the next turn sees it

        thread = threading.Thread(target=body, name="controllers")
        thread.start()
        return thread

    def objects(self) -> dict[tuple[str, str], Object]:
        """Everything with our label, by kind and name; also a Secret, which the operator cannot see."""
        return {
            (found["kind"], found["metadata"]["name"]): found
            for kind in COLLECTED
            for found in self._list(kind.api_version, kind.kind, labelSelector=OURS)
        }

    # ---- inside

    def _list(self, api_version: str, kind: str, **query: str) -> list[Object]:
        return self.client.list(api_version, kind, self.namespace, **query)

    def _run(self, deployment: Object, pods: list[Object]) -> bool:
        spec, mark = deployment["spec"], template_mark(deployment)
        wanted = spec.get("replicas", 1)
        fresh = [pod for pod in pods if pod["metadata"]["annotations"].get(TEMPLATE) == mark]
        stale = [pod for pod in pods if pod not in fresh]
        changed, refused = False, ""
        if len(fresh) < wanted and len(pods) < wanted + (1 if stale else 0):
            try:
                pods = [*pods, self._start(deployment, mark)]
            except Refused as error:
                refused = error.message
            changed = not refused
        elif len(fresh) > wanted or (stale and sum(map(is_ready, pods)) > wanted - (not any(map(is_ready, stale)))):
            victim = (stale or sorted(fresh, key=is_ready))[0]
            self._end(victim)
            pods = [pod for pod in pods if pod is not victim]
            changed = True
        for pod in pods:
            changed = self._tell(pod) or changed
        return self._status(deployment, pods, mark, refused) or changed

    def _start(self, deployment: Object, mark: str) -> Object:
        self._number += 1
        metadata, template = deployment["metadata"], deployment["spec"]["template"]
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
        name = f"{metadata['name'][:40].rstrip('-')}-{self._number}-{metadata['uid'][:4]}"
        made = self.client.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    "labels": template["metadata"]["labels"],
                    "annotations": {**template["metadata"].get("annotations", {}), TEMPLATE: mark},
                    "ownerReferences": [{**owner, "controller": True}],
                },
                "spec": template["spec"],
            }
        )
        return {"apiVersion": "v1", "kind": "Pod", **made}

    def _end(self, pod: Object) -> None:
        owners = pod["metadata"].get("ownerReferences", ())
        self.client.delete(pod, gracePeriodSeconds="0")
        self.ended.append(owners[0]["name"] if owners else "")

    def _tell(self, pod: Object) -> bool:
        ready = self.ready(pod)
        name = pod["spec"]["containers"][0]["name"]
        status = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [
                {
                    "name": name,
                    "image": "i",
                    "imageID": "",
                    "ready": ready,
                    "started": ready,
                    "restartCount": 0,
                    "state": {"running": {}},
                }
            ],
        }
        known = pod.get("status", {})
        if known.get("containerStatuses") and is_ready(pod) == ready:
            return False
        pod["status"] = self.client.patch(pod, {"status": status}, "status")["status"]
        return True

    def _status(self, deployment: Object, pods: list[Object], mark: str, refused: str) -> bool:
        up = sum(map(is_ready, pods))
        status: Object = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": sum(pod["metadata"]["annotations"].get(TEMPLATE) == mark for pod in pods),
            "readyReplicas": up,
            "availableReplicas": up,
        }
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": refused}
        known = deployment.get("status", {})
        conditions = [failure] if refused else []
        same = all(known.get(name, 0) == value for name, value in status.items())
        if same and bool(known.get("conditions")) == bool(conditions):
            return False
        self.client.patch(deployment, {"status": {**status, "conditions": conditions}}, "status")
        return True


def owner_of(found: Object) -> str | None:
    owners = found["metadata"].get("ownerReferences", ())
    return owners[0]["uid"] if owners else None


def template_mark(deployment: Object) -> str:
    """Another one means other pods."""
    template = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return hashlib.sha256(template.encode()).hexdigest()[:12]


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
