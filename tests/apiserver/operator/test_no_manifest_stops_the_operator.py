"""R042: whatever the API server accepts is either served or told what is wrong with it, and nobody waits for it.

Random manifests; ``KVFERRY_FUZZ_SERVICES`` says how many.
"""

import json
import os

import pytest
from kubernetes.aio.client import ApiClient

from kvferry_operator.shell.queue import Outcome
from kvferry_operator.shell.reconcile import INTERNAL
from tests.apiserver.operator.install import Installation
from tests.apiserver.operator.lives import Life
from tests.apiserver.operator.service import Service
from tests.operator.manifest_fuzz import Fuzz
from tests.support.kube_client import Refused

SERVICES = int(os.environ.get("KVFERRY_FUZZ_SERVICES", "60"))


@pytest.mark.timeout(1800)
async def test_each_accepted_manifest_is_served_or_told_what_is_wrong(
    everywhere: Installation, client: ApiClient
) -> None:
    """Ready conditions with a reason for all, no failure of ours, and no pass that the server answers with a riddle."""
    fuzz = Fuzz(42)
    namespace = everywhere.add_namespace()
    life = Life(everywhere, client, namespace)
    made: dict[str, Service] = {}
    for number in range(SERVICES):
        manifest = fuzz.manifest()
        name = f"f{number}"
        manifest["metadata"] |= {"name": name, "namespace": namespace}
        try:
            everywhere.server.client.create(manifest)
        except Refused as refused:
            assert refused.code in (400, 422), refused
            continue
        made[name] = Service(everywhere.server, namespace, name)
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
