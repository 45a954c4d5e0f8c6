"""R036: the operator ends before or after any of its calls, or an answer gets lost; the next life reaches the same.

Every call of create, scale, update and prune is a place to end. By default a spread sample of them is tried;
``KVFERRY_CRASHES=all`` tries each.
"""

import os
from collections.abc import Callable

import pytest
from kubernetes.aio.client import ApiClient

from tests.apiserver.operator.install import Installation
from tests.apiserver.operator.lives import Crash, Life
from tests.apiserver.operator.service import Service

SAMPLE = 10  # one of so many places
WHENS = ("before", "after", "lost")
EDITS: dict[str, Callable[[Service], None]] = {
    "create": lambda service: service.write(),
    "scale": lambda service: service.scale("decode", 3),
    "number": lambda service: service.write(spec__decode__replicas=2),
    "update": lambda service: service.write(spec__engine={"maxModelLen": 1024}),
    "router": lambda service: service.write(spec__router__port=8123),
    "prune": lambda service: service.write(spec__prefill=..., spec__router__ingress=...),
}


async def prepared(installation: Installation, client: ApiClient, edit: str) -> Service:
    """A service at rest in a namespace of its own, then edited."""
    service = Service(installation.server, installation.add_namespace())
    if edit != "create":
        service.write()
        await Life(installation, client, service.namespace).settle(service.controllers)
        assert not service.controllers.ended
    EDITS[edit](service)
    return service


def places(calls: int) -> list[tuple[int, str]]:
    """Where to end: all, or a sample spread over calls and ways to end."""
    every = [(at, when) for at in range(1, calls + 1) for when in WHENS]
    return every if os.environ.get("KVFERRY_CRASHES") == "all" else every[::SAMPLE]


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
    assert service.settled(), service.found()["status"]
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


@pytest.mark.timeout(900)
async def test_a_service_deleted_after_a_crash_leaves_nothing(everywhere: Installation, client: ApiClient) -> None:
    """Whatever was made when the process ended is collected, and the next life writes nothing for who is gone."""
    whole = await prepared(everywhere, client, "create")
    life = Life(everywhere, client, whole.namespace)
    await life.settle(whole.controllers)
    for at, when in places(len(life.api.calls)):
        service = await prepared(everywhere, client, "create")
        try:
            await Life(everywhere, client, service.namespace, at=at, when=when).settle(service.controllers)
        except Crash:
            pass  # where the last call was lost, its life comes to rest
        service.delete()
        successor = Life(everywhere, client, service.namespace)
        await successor.settle(service.controllers)
        while service.controllers.collect() or service.controllers.step():
            pass
        assert service.controllers.objects() == {}, f"ended {when} call {at}"
        assert successor.api.calls == []
