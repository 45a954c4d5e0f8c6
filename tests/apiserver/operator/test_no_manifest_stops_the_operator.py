"""R042: whatever the API server accepts is either served or told what is wrong with it, and nobody waits for it.

Random manifests; ``KVFERRY_FUZZ_SERVICES`` says how many.
"""

import json
import os
import time
from collections.abc import Callable

import pytest
from kubernetes.aio.client import ApiClient

from kvferry_operator.shell.queue import Outcome
from kvferry_operator.shell.reconcile import INTERNAL
from tests.apiserver.operator.install import Installation
from tests.apiserver.operator.lives import Life
from tests.apiserver.operator.process import OperatorProcess
from tests.apiserver.operator.service import Service
from tests.operator.manifest_fuzz import Fuzz
from tests.support.api_server import ApiServer
from tests.support.kube_client import Refused
from tests.support.waiting import wait_for

SERVICES = int(os.environ.get("KVFERRY_FUZZ_SERVICES", "60"))
BESIDE = max(40, SERVICES // 4)  # of the process


def make_random(server: ApiServer, namespace: str, count: int, seed: int) -> dict[str, Service]:
    """Of so many random manifests those that the server takes; it refuses the others as such."""
    fuzz = Fuzz(seed)
    made: dict[str, Service] = {}
    for number in range(count):
        manifest = fuzz.manifest()
        name = f"f{number}"
        manifest["metadata"] |= {"name": name, "namespace": namespace}
        try:
            server.client.create(manifest)
        except Refused as refused:
            assert refused.code in (400, 422), refused
            continue
        made[name] = Service(server, namespace, name)
    return made


@pytest.mark.timeout(1800)
async def test_each_accepted_manifest_is_served_or_told_what_is_wrong(
    everywhere: Installation, client: ApiClient
) -> None:
    """Ready conditions with a reason for all, no failure of ours, and no pass that the server answers with a riddle."""
    namespace = everywhere.add_namespace()
    life = Life(everywhere, client, namespace)
    made = make_random(everywhere.server, namespace, SERVICES, seed=42)
    assert len(made) >= SERVICES // 10
    life.look()
    wrong = []
    for name, service in made.items():
        outcome: Outcome = await life.reconciler.run((namespace, name))
        status, reason = service.condition()
        told = service.message()
        if not status or not reason or not told or reason == INTERNAL or (outcome.failed and reason == "Starting"):
            wrong.append((name, status, reason, told, json.dumps(service.found()["spec"])[:600]))
    assert not wrong, wrong[:5]


@pytest.mark.timeout(900)
def test_the_process_goes_on_and_a_good_service_waits_for_no_bad_one(
    running: OperatorProcess, make_service: Callable[..., Service]
) -> None:
    """Each random one is told something; a good one beside them is ready at most 5 s later than one alone."""

    def seconds_until_ready(name: str) -> float:
        begun = time.monotonic()
        service = make_service(name)
        wait_for(service.settled, f"{name} to be ready", 120.0)
        return time.monotonic() - begun

    alone = seconds_until_ready("alone")
    made = list(make_random(running.installation.server, running.installation.namespaces[2], BESIDE, seed=7).values())
    assert len(made) >= BESIDE // 10
    left = list(made)

    def told() -> bool:
        while left and left[-1].condition()[1]:
            left.pop()
        return not left

    wait_for(told, f"all {len(made)} to be told something", 300.0)
    assert INTERNAL not in {service.condition()[1] for service in made}
    assert seconds_until_ready("beside") - alone < 5.0
    assert running.process.poll() is None
    assert not [line for line in running.lines() if line.get("level") == "error"]
