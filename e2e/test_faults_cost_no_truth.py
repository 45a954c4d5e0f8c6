"""A running service under faults of pods, nodes and the API server: it goes on, or says honestly that it cannot.

The tests share one service with two decode pods.
"""

import re
import threading
from collections.abc import Callable, Iterator

import pytest

from e2e.harness.asking import Answer, ask, traffic, undisturbed
from e2e.harness.kubectl import Kubectl, KubectlError, Object, conditions
from e2e.harness.nodes import Nodes
from e2e.harness.service import TRUTH_S, Service, ready_service
from e2e.harness.waiting import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

API_AWAY_S = 120.0
# Stops the engine process of a pod; its API server is the container's first process.
STOP_ENGINE = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").iterdir():
    if not folder.name.isdigit() or int(folder.name) == os.getpid():
        continue  # this program names the module too
    if b"kvferry_runtime.engine.process" in (folder / "cmdline").read_bytes():
        os.kill(int(folder.name), signal.SIGSTOP)
        print(folder.name)
"""
# Takes all memory there is, until the kernel has killed the pod's own process: the engine, or the router. What still
# asks for memory in that moment costs hogs, and not the engine's server: the victim's score is highest, then theirs.
HOG = """
import os, pathlib, signal, time
def score(pid, least):
    path = pathlib.Path("/proc") / str(pid) / "oom_score_adj"
    path.write_text(str(max(least, int(path.read_text()))))
def told(pid):
    try:
        return (pathlib.Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""
pids = [int(folder.name) for folder in pathlib.Path("/proc").iterdir() if folder.name.isdigit()]
engines = [pid for pid in pids if pid != os.getpid() and b"kvferry_runtime.engine.process" in told(pid)]
victim, hogs = (engines or [1])[0], []
score(victim, 1000)
score(os.getpid(), 960)
while told(victim):
    hogs.append(os.fork())
    if hogs[-1] == 0:
        held = b"x" * (32 << 20)
        signal.pause()
    time.sleep(0.05)
for hog in hogs:
    os.kill(hog, signal.SIGKILL)
if victim != 1:
    print("survived")
"""
OOM_TOLD_S = 10.0
OPERATOR = "app.kubernetes.io/instance=kvferry"


@pytest.fixture(scope="module")
def shared(kubectl: Kubectl) -> Iterator[Service]:
    """One service for all tests of this file."""
    with ready_service(kubectl, "steady", decode={"replicas": 2}) as made:
        yield made


def restarts(service: Service) -> dict[str, int]:
    """Of each pod of the service."""
    states = {pod["metadata"]["name"]: pod["status"].get("containerStatuses", ()) for pod in _pods(service)}
    return {name: sum(each["restartCount"] for each in containers) for name, containers in states.items()}


def _pods(service: Service) -> list[Object]:
    return [pod for role in ("prefill", "decode", "router") for pod in service.pods(role)]


def _is_ready(pod: Object) -> bool:
    return conditions(pod).get("Ready", {}).get("status") == "True"


def wait_restarted(service: Service, before: dict[str, int]) -> None:
    """Until one container has been started again and every pod is ready."""
    wait_for(lambda: sum(restarts(service).values()) == sum(before.values()) + 1, "one restart", 60, service.told)
    wait_for(lambda: all(_is_ready(pod) for pod in _pods(service)), "every pod to be ready", 180, service.told)
    service.wait_ready(60)


@pytest.mark.restarts_operator
def test_serving_goes_on_without_the_api_server(service: Service, nodes: Nodes) -> None:
    """Two minutes without an API server: every answer is whole, no pod is started again, and all is well after."""
    url, before = service.url_by_address(), restarts(service)
    waited = threading.Event()
    with traffic(lambda prompt: nodes.ask(url, prompt)) as clients:
        with nodes.api_server_away():
            waited.wait(API_AWAY_S)
        asked = len(clients.answers)
    assert not clients.failures()
    assert asked > 10
    service.wait_ready(60)
    assert restarts(service) == before


def test_a_restart_of_the_kubelet_goes_unnoticed(service: Service, nodes: Nodes, hostnames: list[str]) -> None:
    """The kubelet of every node is restarted: pods and answers go on."""
    url, before = service.url_by_address(), restarts(service)
    with traffic(lambda prompt: nodes.ask(url, prompt)) as clients:
        for node in hostnames:
            nodes.restart_kubelet(node)
            wait_for(
                lambda node=node: nodes.succeeds(node, "systemctl", "is-active", "kubelet"),
                f"the kubelet of {node}",
                60,
            )
        seen = len(clients.answers)
        wait_for(lambda: len(clients.answers) >= seen + 6, "six more answers", 120)
    assert not clients.failures()
    service.wait_ready(60)
    assert restarts(service) == before


def test_a_killed_decode_pod_ends_its_stream_honestly(service: Service, nodes: Nodes) -> None:
    """SIGKILL in the middle of a stream: the answer goes on whole, or ends in an explicit error that is counted."""
    with service.address() as address:
        expected = ask(address, max_tokens=160)
        assert expected.whole, expected.told()
        router = service.pods("router")[0]["metadata"]["name"]
        before, began = service.metrics(router), restarts(service)
        answer = _ask_and(address, lambda: _kill_busy(service, nodes))
        counted = service.metrics(router)
    if answer.whole:
        assert answer.text == expected.text
    else:
        assert answer.error, answer.told()
        assert not answer.done
        assert expected.text.startswith(answer.text)
        assert _failed(counted) == _failed(before) + 1
    wait_restarted(service, began)
    assert len(service.pods("decode")) == 2


@pytest.mark.restarts_operator
def test_serving_goes_on_without_the_operator(service: Service, nodes: Nodes, release: str) -> None:
    """No operator: pods that die or are deleted come back and every answer is whole; what was asked is done later."""
    system, url = Kubectl(release), service.url_by_address()
    killed, deleted = service.pods("decode")

    def scale_operator(replicas: int) -> None:
        system.run("scale", "deployment", f"--selector={OPERATOR}", f"--replicas={replicas}")

    with traffic(lambda prompt: nodes.ask(url, prompt)) as clients:
        scale_operator(0)
        try:
            wait_for(lambda: not system.list("pods", OPERATOR), "the operator to be gone", 90)
            before = restarts(service)
            nodes.kill_container(killed, "decode")
            wait_restarted(service, before)
            service.kubectl.delete("pod", deleted["metadata"]["name"], "--wait=false")
            wait_for(lambda: deleted["metadata"]["name"] not in restarts(service), "the pod to go", 90, service.told)
            wait_for(lambda: all(_is_ready(pod) for pod in _pods(service)), "another pod", 180, service.told)
            service.kubectl.run("scale", "infsvcrole", f"{service.name}-decode", "--replicas=1")
        finally:
            scale_operator(1)
        wait_for(lambda: len(service.pods("decode")) == 1, "one decode pod, as was asked meanwhile", 120, service.told)
        service.kubectl.run("scale", "infsvcrole", f"{service.name}-decode", "--replicas=2")
        service.wait_ready()
    assert not clients.failures()


def test_a_killed_prefill_pod_costs_no_answer(service: Service, nodes: Nodes) -> None:
    """SIGKILL of the only prefill pod: decode pods compute prompts meanwhile."""
    url = service.url_by_address()
    with traffic(lambda prompt: nodes.ask(url, prompt)) as clients:
        wait_for(lambda: len(clients.answers) > 1, "answers", 60)
        began = restarts(service)
        nodes.kill_container(service.pods("prefill")[0], "prefill")
        wait_restarted(service, began)
    assert not clients.failures()


def test_a_wedged_engine_is_told_and_mended(service: Service) -> None:
    """An engine that is alive but silent: its pod says that it is not ready, others serve, and it mends itself."""
    pod, before = service.pods("decode")[0]["metadata"]["name"], restarts(service)
    assert service.kubectl.python(pod, STOP_ENGINE).split()
    said = wait_for(
        lambda: pod in service.condition("DecodeReady").get("message", "") and service.condition("DecodeReady"),
        f"the status to tell of {pod}",
        TRUTH_S,
        service.told,
    )
    assert said["reason"] == "SomeReady"
    with service.address() as address:
        answer = ask(address, max_tokens=8)
    assert answer.whole, answer.told()
    service.wait_ready(120)
    assert restarts(service) == before, "the pod starts its engine again by itself"


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_memory_beyond_the_limit_is_told_and_ends_one_pod(service: Service, nodes: Nodes, role: str) -> None:
    """The kernel kills a process: the status says so at once, no other pod falls, answers are exact or break off.

    Of an engine pod it kills the engine, which its server starts again, or (cgroup v2) the whole container.
    """
    url, began = service.url_by_address(), restarts(service)

    def asker(prompt: str) -> Answer:
        return nodes.ask(url, prompt, max_tokens=48)

    expected = undisturbed(asker, 3)
    pod = service.pods(role)[0]["metadata"]["name"]
    with traffic(asker, 3, list(expected)) as clients:
        wait_for(lambda: len(clients.answers) > 1, "answers", 60)
        ended = _take_all_memory(service, pod)
        why = "OOMKilled" if ended else pod  # first only that it does not answer: the kubelet tells why a moment later
        wait_for(lambda: why in _told_of(service, role, pod), f"{why} in the status", OOM_TOLD_S, service.told)
        wait_for(lambda: all(_is_ready(each) for each in _pods(service)), "every pod to be ready", 180, service.told)
    assert ended or role != "router"
    assert restarts(service) == {**began, pod: began[pod] + ended}
    lost = [answer for answer in clients.answers if not answer.whole]
    service.check([answer for answer in clients.answers if answer.whole], expected)
    if role == "router":  # the only one: its answers break off, and nobody takes them for whole
        assert all(expected[answer.prompt].startswith(answer.text) and not answer.done for answer in lost)
    else:
        service.check(lost)


def _take_all_memory(service: Service, pod: str) -> bool:
    """Until the kernel kills the pod's engine or router; returns whether its container ended by that."""
    try:
        return "survived" not in service.kubectl.python(pod, HOG)
    except KubectlError as error:
        assert re.search("137|signal: killed", str(error)), error
        return True


def _told_of(service: Service, role: str, pod: str) -> str:
    """What the role's condition says of a pod that does not answer; empty while it says nothing of it."""
    message: str = service.condition(f"{role.capitalize()}Ready").get("message", "")
    return message if pod in message else ""


def _ask_and(address: str, act: Callable[[], None]) -> Answer:
    """Ask, and do something once the answer has begun."""
    done = threading.Event()

    def on_token(pieces: int) -> None:
        if pieces >= 8 and not done.is_set():
            done.set()
            act()

    return ask(address, max_tokens=160, on_token=on_token)


def _kill_busy(service: Service, nodes: Nodes) -> None:
    """Kill the decode pod that writes the one answer under way."""
    busy: list[Object] = []
    for pod in service.pods("decode"):
        if service.metrics(pod["metadata"]["name"]).get("kvferry:legs", 0) > 0:
            busy.append(pod)
    assert len(busy) == 1, "one decode pod writes the answer"
    nodes.kill_container(busy[0], "decode")


def _failed(metrics: dict[str, float]) -> float:
    """Requests that the router counted as anything but answered."""
    return sum(
        value
        for name, value in metrics.items()
        if name.startswith("kvferry:router_requests_total{") and 'outcome="ok"' not in name
    )
