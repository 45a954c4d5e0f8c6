"""Other clients and hasty users: who writes to a service beside us, scales without a pause or deletes at once."""

import threading
import time
from collections import Counter
from collections.abc import Callable

from kvferry_operator.plan.manifests.meta import Object
from tests.apiserver.operator.process import OperatorProcess
from tests.apiserver.operator.service import Service
from tests.support.waiting import wait_for

MEDDLED_S = 6.0
EACH_S = 0.05
KOPF = "kopf.zalando.org/"
LEFTOVERS = {
    f"{KOPF}last-handled-configuration": '{"spec":{"model":{"source":"toy"}}}\n',
    f"{KOPF}create_fn": '{"started":"2020-01-01T00:00:00","purpose":"create","retries":1,"success":false}',
    f"{KOPF}touch-dummy": "2020-01-01T00:00:00",
}


def pause(seconds: float) -> None:
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > until, f"{seconds} s to pass", seconds + 5.0)


def made(process: OperatorProcess, service: Service) -> Counter[tuple[str, str]]:
    """How often each object of a service was made."""
    return Counter(
        (str(line["kind"]), str(line["name"]))
        for line in process.lines()
        if line.get("why") == "missing"
        and line.get("namespace") == service.namespace
        and str(line["name"]).startswith(service.name)
    )


def test_a_client_that_writes_all_the_time_neither_doubles_nor_loses_anything(
    running: OperatorProcess, make_service: Callable[..., Service]
) -> None:
    """B132, B149: labels and annotations of the service change each 50 ms while it is made and edited. Each child is
    made once, the status ends right, and there is neither a conflict nor an error."""
    stop, written = threading.Event(), []
    before = running.metrics()

    def meddle(service: Service) -> None:
        while not stop.wait(EACH_S):
            mark = str(len(written))
            body = {"metadata": {"annotations": {"example.com/beat": mark}, "labels": {"beat": mark}}}
            service.server.client.patch(service.ref("InferenceService", service.name), body)
            written.append(mark)

    service = make_service("meddled")
    thread = threading.Thread(target=meddle, args=(service,))
    thread.start()
    try:
        wait_for(service.settled, "the service to be ready", 60.0)
        service.write(spec__decode__replicas=2, spec__router__port=8123)
        pause(MEDDLED_S)
    finally:
        stop.set()
        thread.join()
    wait_for(lambda: service.settled() and ":8123/" in service.found()["status"]["url"], "the edit to be served", 60.0)
    assert len(written) >= 20
    assert set(made(running, service).values()) == {1}
    assert [role["readyReplicas"] for role in service.found()["status"]["roles"] if role["name"] == "decode"] == [2]
    after = running.metrics()
    refused = {
        name: after[name] - before.get(name, 0) for name in after if "api_calls" in name and 'code="409"' in name
    }
    assert sum(refused.values()) <= 2, refused
    assert not [line for line in running.lines() if line.get("level") == "error"]


def test_numbers_in_the_status_follow_whoever_scales_without_a_pause(make_service: Callable[..., Service]) -> None:
    """B134: decode 1, 3, 1, 2 with an edit of a label in between: the status ends at what the Deployments have."""
    service = make_service("hasty")
    wait_for(service.settled, "the service to be ready")
    for number, replicas in enumerate((3, 1, 2)):
        service.scale("decode", replicas)
        body = {"metadata": {"labels": {"turn": str(number)}}}
        service.server.client.patch(service.ref("InferenceService", service.name), body)

    def agrees() -> bool:
        roles = {role["name"]: role for role in service.found()["status"]["roles"]}
        for name in ("prefill", "decode", "router"):
            deployment = service.deployment(name)
            wanted = {"replicas": deployment["spec"]["replicas"], "ready": deployment["status"].get("readyReplicas", 0)}
            if wanted != {"replicas": roles[name]["replicas"], "ready": roles[name]["readyReplicas"]}:
                return False
        return bool(roles["decode"]["replicas"] == 2)

    wait_for(lambda: service.settled() and agrees(), "status and Deployments to agree", 30.0)

    def role_agrees() -> bool:
        role = service.server.client.get(service.ref("InferenceServiceRole", f"{service.name}-decode"))
        return bool(role["status"]["replicas"] == role["status"]["readyReplicas"] == 2)

    wait_for(role_agrees, "the role's numbers, which are written after the service's", 10.0)


def test_what_an_operator_of_kopfs_left_on_a_service_is_let_be(
    running: OperatorProcess, make_service: Callable[..., Service]
) -> None:
    """B143: half-done progress of handlers that are no more makes nobody patch: the service is not written at all."""
    service = make_service("leftover")
    wait_for(service.settled, "the service to be ready")
    service.server.client.patch(service.ref("InferenceService", service.name), {"metadata": {"annotations": LEFTOVERS}})
    version = service.found()["metadata"]["resourceVersion"]
    calls = running.calls()
    pause(3.0)
    found = service.found()
    assert found["metadata"]["resourceVersion"] == version
    assert {name: found["metadata"]["annotations"][name] for name in LEFTOVERS} == LEFTOVERS
    assert running.calls() == calls
    service.write(spec__router__port=8123)
    wait_for(lambda: service.settled() and ":8123/" in service.found()["status"]["url"], "an edit to be served")


def test_a_service_that_goes_while_it_is_made_leaves_nothing(
    running: OperatorProcess, make_service: Callable[..., Service]
) -> None:
    """B150: deleted after some of its objects were made. What comes after it has no owner and is collected; the
    operator writes nothing more."""
    for number, seconds in enumerate((0.0, 0.05, 0.15, 0.3, 0.6)):
        service = make_service(f"brief{number}")
        pause(seconds)
        service.delete()
        wait_for(lambda: not service.controllers.objects(), "all that was made to be collected")  # noqa: B023
        calls = running.calls()
        pause(1.0)
        assert running.calls() == calls
        assert not service.controllers.objects()
    assert not [line for line in running.lines() if line.get("level") == "error"]


def test_a_namespace_that_ends_is_not_filled_again(
    running: OperatorProcess, make_service: Callable[..., Service]
) -> None:
    """R041: the server refuses new objects there. The operator is told so a few times, is not in the way of the
    deletion, and others are served meanwhile."""
    service = make_service("doomed", 2)
    wait_for(service.settled, "the service to be ready")
    client = service.server.client
    client.delete({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": service.namespace}})
    begun, calls = time.monotonic(), running.calls()
    plan: Object | None = service.child("ConfigMap", "doomed-plan")
    assert plan is not None
    client.delete(plan)  # the namespace's controller takes one after another, and this one first
    beside = make_service("beside", 1)
    wait_for(beside.settled, "a service elsewhere to be ready")
    pause(4.0)
    assert service.child("ConfigMap", "doomed-plan") is None
    assert running.calls() - calls < 100 + 10 * (time.monotonic() - begun)
    service.delete()
    wait_for(lambda: not service.controllers.objects(), "all children to be collected")
    assert not [found for found in [beside.found()] if found["metadata"].get("finalizers")]
