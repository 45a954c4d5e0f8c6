"""Faults drawn by chance, one after the other, while clients ask: no wrong text, no silent end, nothing leaked.

`E2E_SEED=N` draws the faults of a former run again, `E2E_CHAOS_S` sets for how long they come. Routers are spared: of
theirs ``test_faults_cost_no_truth.py`` tells.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.harness.asking import Answer, traffic, undisturbed
from e2e.harness.kubectl import Kubectl, KubectlError, Object
from e2e.harness.nodes import Nodes
from e2e.harness.readiness import readiness
from e2e.harness.service import Service, ready_service
from e2e.harness.waiting import wait_for
from e2e.test_faults_cost_no_truth import STOP_ENGINE

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

SECONDS = float(os.environ.get("E2E_CHAOS_S", "150"))
CLIENTS = 6
TOKENS = 64
MOST_AT_ONCE_S = 12.0  # between two faults, at most: the next may come before the last is mended

Fault = Callable[[Service, Nodes, random.Random], str]


class NothingHarmedError(Exception):
    """What was drawn could not be done: there was nothing to harm, or it was gone before."""


@pytest.fixture(scope="module")
def shared(kubectl: Kubectl) -> Iterator[Service]:
    changes: dict[str, Any] = {role: {"replicas": 2} for role in ("prefill", "decode")}
    with ready_service(kubectl, "chaos", engine={"kvMemory": "256Mi"}, **changes) as made:
        yield made


def some_pod(service: Service, role: str, rng: random.Random) -> Object:
    """A pod of the role that runs and does not leave."""
    pods = [
        pod
        for pod in service.pods(role)
        if "deletionTimestamp" not in pod["metadata"]
        and any("running" in each["state"] for each in pod["status"].get("containerStatuses", ()))
    ]
    if not pods:
        raise NothingHarmedError(f"no {role} pod runs")
    return rng.choice(sorted(pods, key=lambda pod: str(pod["metadata"]["name"])))


def kill(service: Service, nodes: Nodes, rng: random.Random) -> str:
    """SIGKILL of a pod's server."""
    role = rng.choice(["prefill", "decode"])
    pod = some_pod(service, role, rng)
    try:
        nodes.kill_container(pod, role)
    except AssertionError as error:  # it has ended since it was listed
        raise NothingHarmedError(str(error)) from None
    return f"killed the server of {pod['metadata']['name']}"


def delete(service: Service, nodes: Nodes, rng: random.Random) -> str:
    """A pod is deleted, with a long or a short grace."""
    pod = some_pod(service, rng.choice(["prefill", "decode"]), rng)
    grace = rng.choice([0, 2, 30])
    service.kubectl.delete("pod", pod["metadata"]["name"], f"--grace-period={grace}", "--wait=false", "--force=false")
    return f"deleted {pod['metadata']['name']} with a grace of {grace} s"


def wedge(service: Service, nodes: Nodes, rng: random.Random) -> str:
    """An engine stops, its server does not."""
    pod = some_pod(service, rng.choice(["prefill", "decode"]), rng)
    try:
        stopped = service.kubectl.python(pod["metadata"]["name"], STOP_ENGINE).split()
    except KubectlError as error:  # it has ended since it was listed
        raise NothingHarmedError(str(error)) from None
    if not stopped:
        raise NothingHarmedError(f"no engine runs in {pod['metadata']['name']}")
    return f"stopped engine {stopped} of {pod['metadata']['name']}"


def scale(service: Service, nodes: Nodes, rng: random.Random) -> str:
    """Another number of pods."""
    role, replicas = rng.choice(["prefill", "decode"]), rng.choice([1, 2, 3])
    service.kubectl.run("scale", "infsvcrole", f"{service.name}-{role}", f"--replicas={replicas}")
    return f"scaled {role} to {replicas}"


def restart_kubelet(service: Service, nodes: Nodes, rng: random.Random) -> str:
    """Of one node."""
    node = rng.choice(sorted(each["metadata"]["name"] for each in service.kubectl.list("nodes")))
    nodes.restart_kubelet(node)
    return f"restarted the kubelet of {node}"


FAULTS: dict[Fault, int] = {kill: 4, delete: 3, wedge: 1, scale: 2, restart_kubelet: 1}  # how often, in parts


def test_faults_drawn_by_chance(service: Service, nodes: Nodes) -> None:
    """Each answer is exact, or there was no decode pod to give it, which is said; at the end no pod keeps anything."""
    seed = int(os.environ.get("E2E_SEED") or random.SystemRandom().randrange(10**6))
    rng = random.Random(seed)
    url = service.url_by_address()

    def asker(prompt: str) -> Answer:
        return nodes.ask(url, prompt, max_tokens=TOKENS)

    expected = undisturbed(asker, 4)
    done, harms = [f"E2E_SEED={seed}"], 0
    with readiness(service, "decode") as decode, traffic(asker, CLIENTS, list(expected)) as clients:
        begun = time.monotonic()
        while time.monotonic() - begun < SECONDS:
            time.sleep(rng.uniform(1.0, MOST_AT_ONCE_S))
            (fault,) = rng.choices(list(FAULTS), list(FAULTS.values()))
            try:
                what = fault(service, nodes, rng)
                harms += 1
            except NothingHarmedError as error:
                what = f"no {fault.__name__}: {error}"
            done.append(f"{time.monotonic() - begun:6.1f} s: {what}")
        for role in ("prefill", "decode"):
            service.kubectl.run("scale", "infsvcrole", f"{service.name}-{role}", "--replicas=2")
        service.wait_ready(300)
    print("\n".join(done))
    told = "\n".join(done)
    broken = [answer for answer in clients.answers if not answer.whole]
    service.check([answer for answer in clients.answers if answer.whole], expected)
    silent = [answer.told() for answer in broken if not answer.error or answer.done]  # an error may end in a cut
    assert not silent, f"{told}\n{silent}"
    untrue = [answer.told() for answer in broken if not expected[answer.prompt].startswith(answer.text)]
    assert not untrue, f"{told}\n{untrue}"
    print(f"{len(clients.answers)} answers, {len(broken)} ended in an explicit error:")
    print("\n".join(f"{answer.ended_at - begun:6.1f} s: {answer.error}" for answer in broken))
    refused = decode.refused(broken)
    assert not refused, "\n".join([told, *refused])
    assert len(clients.answers) - len(broken) >= CLIENTS, told
    assert harms >= (len(done) - 1) // 2, told
    wait_for(lambda: len(engines(service)) == 4, "the pods that leave to be gone", 120, service.told)
    for pod in engines(service):
        wait_for(lambda pod=pod: kept_by(service, pod) == {}, f"{pod['metadata']['name']} to keep nothing", 60)


def engines(service: Service) -> list[Object]:
    return [pod for role in ("prefill", "decode") for pod in service.pods(role)]


def kept_by(service: Service, pod: Object) -> dict[str, float]:
    """What a pod still holds of requests."""
    found = service.metrics(pod["metadata"]["name"])
    used = found["kvferry:kv_blocks_total"] - found["kvferry:kv_blocks_free"]
    held = {"legs": found["kvferry:legs"], "leases": found["kvferry:kv_leases"], "blocks": used}
    return {name: value for name, value in held.items() if value}
