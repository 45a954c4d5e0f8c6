"""Pods leave under load, by a drain of their node, by hand, by a short grace and by a rollout: each answer is exact.

The tests share one service with two decode pods and two routers. Clients ask without sampling, from a node, by the
Service's address.
"""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from e2e.harness.asking import Answer, ask, traffic, undisturbed
from e2e.harness.departures import UNREADY_S, Departure, departures
from e2e.harness.kubectl import Kubectl
from e2e.harness.nodes import Nodes
from e2e.harness.service import Service, ready_service
from e2e.harness.waiting import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TOKENS = 64  # of an answer: some seconds, so that pods leave in the middle of it
CLIENTS = 4
ROLLOUT_CLIENTS = 16
PROMPTS = 4
REFUSED_S = 3.0  # for two refusals: a request waits 0.75 s for a pod that comes back
SMALL = {"engine": {"kvMemory": "256Mi"}}

Asker = Callable[[str], Answer]


@pytest.fixture(scope="module")
def shared(kubectl: Kubectl) -> Iterator[Service]:
    with ready_service(kubectl, "leaving", decode={"replicas": 2}, router={"replicas": 2}, **SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def asker(shared: Service, nodes: Nodes) -> Asker:
    url = shared.url_by_address()
    return lambda prompt: nodes.ask(url, prompt, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def expected(asker: Asker) -> dict[str, str]:
    """The right answer to each prompt."""
    return undisturbed(asker, PROMPTS)


def name_of(service: Service, role: str) -> str:
    """A pod of the role: of decode pods the one that is busy."""
    busy = service.busiest()
    name: str = busy if role == "decode" else service.pods(role)[0]["metadata"]["name"]
    return name


def check_left(gone: list[Departure]) -> None:
    """Each pod got nothing new at once, and ended in order within its grace."""
    for pod in gone:
        assert pod.ended()["exitCode"] == 0, pod.told()
        assert pod.left_s() >= 0, pod.told()
        assert pod.unready_after_s <= UNREADY_S, f"{pod.name}: {pod.unready_after_s:.2f} s"


def moved(answers: list[Answer]) -> int:
    return sum("moved" in answer.resumed for answer in answers)


@pytest.mark.restarts_operator
def test_a_drained_node_costs_no_answer(
    service: Service, asker: Asker, expected: dict[str, str], hostnames: list[str], cluster: Kubectl
) -> None:
    """`kubectl drain`: decode, router, and whatever else runs on that node, go to the other one."""
    if len(hostnames) < 2:
        pytest.skip("needs two nodes that take pods: make cluster-up NODES=2")
    with departures(service) as leaving, traffic(asker, CLIENTS, list(expected)) as clients:
        busy = service.kubectl.get("pod", service.busiest()) or {}
        drained = busy["spec"]["nodeName"]
        try:
            cluster.run(
                *("drain", drained, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s"),
                timeout_s=260,
            )
            gone = leaving.wait_gone(2, 60)
            seen = len(clients.answers)
            wait_for(lambda: len(clients.answers) >= seen + CLIENTS, "answers of the pods elsewhere", 120)
        finally:
            cluster.run("uncordon", drained)
        service.wait_ready(240)  # there may have been no room for all pods meanwhile
    service.check(clients.answers, expected)
    check_left(gone)
    assert {pod.role for pod in gone} >= {"decode", "router"}
    assert moved(clients.answers)


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_replaced_pod_costs_no_answer(service: Service, asker: Asker, expected: dict[str, str], role: str) -> None:
    """`kubectl delete pod` under load: another one comes, and what the pod had goes on."""
    with departures(service) as leaving, traffic(asker, CLIENTS, list(expected)) as clients:
        service.kubectl.delete("pod", name_of(service, role), "--wait=false")
        gone = leaving.wait_gone(1, 120)
        service.wait_ready(240)
        seen = len(clients.answers)
        wait_for(lambda: len(clients.answers) >= seen + CLIENTS, "answers with the new pod", 120)
    service.check(clients.answers, expected)
    check_left(gone)
    assert bool(moved(clients.answers)) == (role == "decode")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_grace_of_two_seconds_costs_no_answer(
    service: Service, asker: Asker, expected: dict[str, str], role: str
) -> None:
    """The kubelet cuts the wait before SIGTERM short: by then the pod has given away what it had."""
    with departures(service) as leaving, traffic(asker, CLIENTS, list(expected)) as clients:
        service.kubectl.delete("pod", name_of(service, role), "--grace-period=2", "--wait=false")
        (gone,) = leaving.wait_gone(1, 60)
        service.wait_ready(240)
    service.check(clients.answers, expected)
    assert gone.ended()["exitCode"] == 0, gone.told()


def test_a_rollout_to_another_kv_format_mixes_no_revisions(
    service: Service, asker: Asker, expected: dict[str, str]
) -> None:
    """Each of many answers is exact, whichever pods there were for it: blocks of one size are never read as of another.

    Both compute in float32: in bfloat16 a token may depend on the batch, and no text would be the right one.
    """
    revision = service.seen()["status"]["revision"]
    with departures(service) as leaving, traffic(asker, ROLLOUT_CLIENTS, list(expected)) as clients:
        service.busiest()
        service.apply(decode={"replicas": 2}, router={"replicas": 2}, engine={"kvMemory": "256Mi", "blockSize": 32})
        wait_for(lambda: service.seen()["status"].get("revision") != revision, "another revision", 60, service.told)
        gone = leaving.wait_gone(3, 600)
        service.wait_ready(300)
    service.check(clients.answers, expected)
    check_left(gone)


def test_the_only_decode_pod_ends_its_answers_itself(service: Service, nodes: Nodes) -> None:
    """Scaled to none under load: what it writes is finished, what came too late is told that nobody is there."""
    url = service.url_by_address()

    def ask_long(prompt: str) -> Answer:
        return nodes.ask(url, prompt, max_tokens=3 * TOKENS)

    expected = undisturbed(ask_long, PROMPTS)
    service.kubectl.run("scale", "infsvcrole", f"{service.name}-decode", "--replicas=1")
    wait_for(lambda: len(service.pods("decode")) == 1, "one decode pod", 120, service.told)
    with departures(service) as leaving, traffic(ask_long, CLIENTS, list(expected)) as clients:
        service.busiest()
        service.kubectl.run("scale", "infsvcrole", f"{service.name}-decode", "--replicas=0")
        gone = leaving.wait_gone(1, 180)
    service.kubectl.run("scale", "infsvcrole", f"{service.name}-decode", "--replicas=2")
    served = [answer for answer in clients.answers if answer.status == 200]
    assert served
    service.check(served, expected)
    assert all(answer.status == 503 and answer.error for answer in clients.answers if answer not in served)
    check_left(gone)


def test_who_cannot_be_served_is_told_so(service: Service) -> None:
    """Without decode pods 503 with Retry-After, an unknown model 404 even then; without prefill pods answers."""

    def scale(role: str, replicas: int) -> None:
        service.kubectl.run("scale", "infsvcrole", f"{service.name}-{role}", f"--replicas={replicas}")

    scale("decode", 0)
    wait_for(lambda: not service.pods("decode"), "no decode pod", 120, service.told)
    with service.address() as address:
        begun = time.monotonic()
        nobody, unknown = ask(address), ask(address, model="no-such-model")
        assert time.monotonic() - begun < REFUSED_S
        assert (nobody.status, unknown.status) == (503, 404), (nobody.told(), unknown.told())
        assert int(nobody.headers["retry-after"]) >= 1
        for refused in (nobody, unknown):
            assert json.loads(refused.error)["error"].keys() >= {"message", "type", "code"}
        assert service.condition("DecodeReady")["reason"] == "ScaledToZero"
        scale("prefill", 0)
        scale("decode", 2)
        wait_for(lambda: ask(address).whole, "an answer again", 120, service.told)
        wait_for(lambda: not service.pods("prefill"), "no prefill pod", 120, service.told)
        alone = ask(address, "A prompt that nobody has asked before: which lakes have no way out?")
        assert (alone.whole, alone.path) == (True, "aggregated"), alone.told()
    scale("prefill", 1)
