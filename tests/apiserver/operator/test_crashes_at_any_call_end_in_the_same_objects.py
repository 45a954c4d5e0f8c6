"""R036: the operator ends before or after any of its calls, or an answer gets lost; the next life reaches the same.

Every call of create, scale, update and prune is a place to end. By default a spread sample of them is tried;
``KVFERRY_CRASHES=all`` tries each.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient

from kvferry_operator.api.service import API_VERSION, KIND
from kvferry_operator.plan.manifests.meta import Object
from tests.apiserver.operator.controllers import Controllers
from tests.apiserver.operator.install import Installation
from tests.apiserver.operator.lives import Crash, Life
from tests.operator.manifests import make_manifest

SAMPLE = 9  # one of so many places
WHENS = ("before", "after", "lost")
BASE: dict[str, Any] = {"spec__router__ingress": {"host": "llm.example.com"}}
Edit = Callable[["Service"], None]


class Service:
    """A service in a namespace of its own, as its user sees it."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self.namespace = installation.add_namespace()
        self.controllers = Controllers(installation.server, self.namespace)

    def write(self, **changes: Any) -> None:
        """Create it, or change its spec."""
        given = {path: value for path, value in (BASE | changes).items() if path not in BASE or value is not ...}
        made = make_manifest(**given)
        made["metadata"]["namespace"] = self.namespace
        self.installation.server.client.apply(made, "user")

    def scale(self, role: str, replicas: int) -> None:
        body = {"spec": {"replicas": replicas}}
        self.installation.server.client.patch(self._ref("InferenceServiceRole", f"demo-{role}"), body, "scale")

    def found(self) -> Object:
        return self.installation.server.client.get(self._ref(KIND, "demo"))

    def picture(self) -> Any:
        """All that matters of the end: objects without what differs between two clusters, conditions, and pods."""
        objects = self.controllers.objects()
        pods = sorted(
            found["metadata"]["labels"].get("app.kubernetes.io/component", "")
            for found in objects.values()
            if found["kind"] == "Pod"
        )
        bare = {key: bared(found) for key, found in objects.items() if key[0] not in ("Pod", "Secret")}
        status = self.found()["status"]
        told = {one["type"]: (one["status"], one["reason"], one["message"]) for one in status["conditions"]}
        secrets = sum(kind == "Secret" for kind, _ in objects)
        return bare, told, status["roles"], pods, secrets, sorted(self.controllers.ended)

    def _ref(self, kind: str, name: str) -> Object:
        return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name, "namespace": self.namespace}}


def bared(found: Object) -> Object:
    """An object without identities and times. Its generation stays: each one more is a needless write."""
    bare = copy.deepcopy(found)
    metadata = bare["metadata"]
    for name in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "namespace", "ownerReferences"):
        metadata.pop(name, None)
    for template in [bare["spec"]["template"]] if found["kind"] == "Deployment" else []:
        for volume in template["spec"]["volumes"]:
            volume.pop("secret", None)  # its name holds the service's uid
        container = template["spec"]["containers"][0]
        container["args"] = [argument.partition("/")[2] or argument for argument in container["args"]]
        metadata["annotations"] = {}  # a hash of all that
    if found["kind"] == "Service":
        bare["spec"].pop("clusterIP", None)
        bare["spec"].pop("clusterIPs", None)
    if found["kind"] != "Deployment":
        metadata.get("annotations", {}).pop("serving.kvferry.dev/applied", None)
    return bare


EDITS: dict[str, Edit] = {
    "create": lambda service: service.write(),
    "scale": lambda service: service.scale("decode", 3),
    "number": lambda service: service.write(spec__decode__replicas=2),
    "update": lambda service: service.write(spec__engine={"maxModelLen": 1024}),
    "router": lambda service: service.write(spec__router__port=8123),
    "prune": lambda service: service.write(spec__prefill=..., spec__router__ingress=...),
}


async def prepared(installation: Installation, client: ApiClient, edit: str) -> Service:
    """A service at rest, then edited."""
    service = Service(installation)
    if edit != "create":
        service.write()
        await Life(installation, client, service.namespace).settle(service.controllers)
        assert not service.controllers.ended
    EDITS[edit](service)
    return service


def places(calls: int) -> list[tuple[int, str]]:
    """Where to end: all, or a sample spread over calls and ways to end."""
    every = [(at, when) for at in range(1, calls + 1) for when in WHENS]
    return every if os.environ.get("KVFERRY_CRASHES") == "all" else every[:: SAMPLE + 1]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.timeout(900)
async def test_whatever_call_is_the_last_the_next_life_ends_the_same(
    everywhere: Installation, client: ApiClient, edit: str
) -> None:
    """The same objects, once each, written no more often; the same status; no pod that had to start again."""
    service = await prepared(everywhere, client, edit)
    whole = Life(everywhere, client, service.namespace)
    await whole.settle(service.controllers)
    wanted, calls = service.picture(), whole.api.calls
    assert wanted[1]["Ready"][0] == "True", wanted[1]
    for at, when in places(len(calls)):
        service = await prepared(everywhere, client, edit)
        life = Life(everywhere, client, service.namespace, at=at, when=when)
        try:
            await life.settle(service.controllers)
        except Crash:
            assert when != "lost"
            await Life(everywhere, client, service.namespace).settle(service.controllers)
        got = service.picture()
        assert got == wanted, f"ended {when} call {at} of {len(calls)} ({calls[at - 1]})"
