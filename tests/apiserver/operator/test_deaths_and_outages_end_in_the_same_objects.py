"""Real processes: killed, paused, two at once, without an API server, with one that misbehaves."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from tests.apiserver.operator.conftest import Start
from tests.apiserver.operator.faulty import GONE, Asked, Fault, FaultyServer
from tests.apiserver.operator.install import Installation
from tests.apiserver.operator.process import OperatorProcess
from tests.apiserver.operator.service import Service
from tests.support.waiting import wait_for

DEAD_S = 20.0  # from a holder's death to the next one's first work
SOON_S = 5.0  # from a release
CHANGES = ("created", "applied", "patched", "deleted")
CALLS = "kvferry:operator_api_calls_total"
OUTAGE_S = float(os.environ.get("KVFERRY_OUTAGE_S", "8"))


def free_lease(installation: Installation) -> None:
    """As if its time had passed: a killed holder is followed at once."""
    metadata = {"name": "kvferry-operator", "namespace": installation.release}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
    if installation.server.client.find(lease) is not None:
        installation.server.client.delete(lease)


def changes(process: OperatorProcess) -> int:
    """Changes that it has made so far."""
    return sum(line.get("message") in CHANGES for line in process.lines())


EDITS: dict[str, Callable[[Service], None]] = {
    "create": lambda service: service.write(),
    "scale": lambda service: service.write(spec__decode__replicas=3),
    "update": lambda service: service.write(spec__decode__replicas=3, spec__engine={"maxModelLen": 1024}),
    "prune": lambda service: service.write(spec__prefill=..., spec__router__ingress=..., spec__decode__replicas=3),
}
KILLS = {"create": (1, 4, 9, 15, 20), "scale": (1,), "update": (1, 3, 6), "prune": (1, 2, 4)}


@pytest.mark.timeout(400)
def test_kill_9_while_it_works_changes_nothing_in_the_end(
    installation: Installation, service: Service, start: Start
) -> None:
    """A dozen times, after that many changes of each edit: the same objects, pods and status as without."""
    unharmed = Service(installation.server, installation.namespace, "other")
    process = start()
    process.await_leading()
    for edit, apply in EDITS.items():
        apply(unharmed)
        wait_for(unharmed.settled, f"{edit} without a kill")
        apply(service)
        for count in KILLS[edit]:
            before = changes(process)
            try:
                wait_for(lambda: changes(process) >= before + count, "a moment to kill", 3.0)  # noqa: B023
            except AssertionError:
                pass  # all was done already: killed at rest
            process.send(signal.SIGKILL)
            process.await_end()
            free_lease(installation)
            process = start()
            process.await_leading()
        wait_for(service.settled, f"{edit} after {len(KILLS[edit])} kills", 60.0)
        # An empty Deployment of the former revision goes some moments after the rollout is complete.
        wait_for(lambda: names_of(service) == names_of(unharmed), f"{edit}: the same objects")
    assert service.found()["status"]["roles"] == unharmed.found()["status"]["roles"]


def names_of(service: Service) -> list[tuple[str, str]]:
    """Kinds and names of a service's objects, its own name left out; pods by role alone."""
    owner = service.found()["metadata"]["uid"]
    found = []
    for (kind, name), child in service.controllers.objects().items():
        labels = child["metadata"]["labels"]
        if kind == "Pod" and labels["app.kubernetes.io/instance"] == service.name:
            found.append((kind, labels["app.kubernetes.io/component"]))
        elif any(one["uid"] == owner for one in child["metadata"].get("ownerReferences", ())):
            found.append((kind, "keys" if kind == "Secret" else name.removeprefix(service.name)))
    return sorted(found)


def test_of_two_operators_one_works_and_the_other_follows(
    installation: Installation, service: Service, start: Start
) -> None:
    """The second only looks at the Lease; after kill -9 it leads within 20 s, after SIGTERM within seconds."""
    first = start("first")
    first.await_leading()
    second = start("second")
    second.await_ready()
    service.write()
    wait_for(service.settled, "the service to be ready")
    assert second.calls() == 0
    assert not second.leads()
    first.send(signal.SIGKILL)
    died = time.monotonic()
    second.await_leading(DEAD_S)
    service.write(spec__router__port=8123)
    wait_for(lambda: service.settled() and ":8123/" in service.found()["status"]["url"], "the change to be made")
    assert time.monotonic() - died < DEAD_S + SOON_S
    third = start("third")
    third.await_ready()
    second.send(signal.SIGTERM)
    begun = time.monotonic()
    assert second.await_end(10.0) == 0
    third.await_leading(SOON_S)
    assert time.monotonic() - begun < SOON_S
    service.write(spec__router__port=8124)
    wait_for(lambda: service.settled() and ":8124/" in service.found()["status"]["url"], "the change to be made")


def test_a_holder_that_was_paused_writes_nothing_when_it_wakes(
    installation: Installation, service: Service, start: Start
) -> None:
    """R040: stopped until another leads, with work in its queue; it ends with status 1 and has changed nothing."""
    first = start("first")
    first.await_leading()
    service.write()
    wait_for(service.settled, "the service to be ready")
    second = start("second")
    second.await_ready()
    made = changes(first)
    first.send(signal.SIGSTOP)
    service.write(spec__router__port=8123)
    second.await_leading(DEAD_S)
    wait_for(lambda: service.settled() and ":8123/" in service.found()["status"]["url"], "the second one's work")
    versions = {key: found["metadata"]["resourceVersion"] for key, found in service.controllers.objects().items()}
    service.write(spec__router__port=8124)  # both see it
    first.send(signal.SIGCONT)
    assert first.await_end(30.0) == 1
    assert changes(first) == made
    assert any(line.get("message") == "leadership lost" for line in first.lines())
    wait_for(lambda: service.settled() and ":8124/" in service.found()["status"]["url"], "the second one's work")
    now = {key: found["metadata"]["resourceVersion"] for key, found in service.controllers.objects().items()}
    written = {key for key in versions if versions[key] != now.get(key)}
    assert ("Service", "demo-router") in written
    assert not [
        key for key in written if key[0] in ("ConfigMap", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")
    ]


@pytest.mark.timeout(600)
def test_an_api_server_that_was_away_finds_everything_as_asked(
    installation: Installation, service: Service, start: Start
) -> None:
    """Away for so long that leadership is lost: the process ends once, its successor waits without asking much, and
    converges at once. ``KVFERRY_OUTAGE_S=300`` for the five minutes of R037."""
    server = installation.server
    process = start("first")
    process.await_leading()
    service.write()
    wait_for(service.settled, "the service to be ready")
    server.stop()
    try:
        assert process.await_end(30.0) == 1
        successor = start("second")
        wait_for(lambda: "the Lease cannot be reached" in successor.ask("/readyz")[1], "the successor to say so")
        begun, cpu = time.monotonic(), successor.cpu_s()
        while (seconds := time.monotonic() - begun) < OUTAGE_S:
            assert successor.process.poll() is None, successor.log()
            assert successor.ask("/healthz")[0] == 200
            threading.Event().wait(1.0)
        asked = sum(value for name, value in successor.metrics().items() if name.startswith(CALLS))
        assert asked <= 10 + 10 * seconds
        assert successor.cpu_s() - cpu < 5.0 + 0.3 * seconds
    finally:
        server.start()
    service.write(spec__router__port=8123)
    wait_for(lambda: service.settled() and ":8123/" in service.found()["status"]["url"], "the change", 60.0)
    assert successor.process.poll() is None
    assert not [name for name in service.controllers.ended if "router" not in name]


def test_a_short_outage_is_lived_through(installation: Installation, service: Service, start: Start) -> None:
    """A restart of the server costs neither leadership nor the process."""
    server = installation.server
    process = start()
    process.await_leading()
    service.write()
    wait_for(service.settled, "the service to be ready")
    server.stop()
    server.start()
    service.write(spec__router__port=8123)
    wait_for(lambda: service.settled() and ":8123/" in service.found()["status"]["url"], "the change", 60.0)
    assert process.process.poll() is None
    assert len([line for line in process.lines() if line.get("message") == "leader"]) == 1


def test_a_deletion_that_no_watch_told_is_noticed(
    installation: Installation, service: Service, start: Start, faulty: FaultyServer
) -> None:
    """It fell into a gap between two watches, after which the server has forgotten: kopf lists anew and says nothing of
    what is missing."""
    process = start(kubeconfig=faulty.kubeconfig)
    process.await_leading()
    service.write()
    wait_for(service.settled, "the service to be ready")
    plan = service.child("ConfigMap", "demo-plan")
    assert plan is not None
    faulty.mute = True
    service.server.client.delete(plan)
    faulty.rule = lambda asked: Fault(event=GONE) if asked.watch else None
    lists = faulty.seen["list"]
    faulty.hang_up()
    wait_for(lambda: faulty.seen["list"] >= lists + 8, "new lists")
    faulty.mute = False
    faulty.rule = lambda asked: None
    wait_for(lambda: service.child("ConfigMap", "demo-plan") is not None, "the deletion to be repaired")
    assert process.metrics()["kvferry:operator_vanished_objects_total{}"] >= 1


def every(number: int, fault: Fault) -> Callable[[Asked], Fault | None]:
    """A fault of each so many-th change that is not the Lease's."""
    return lambda asked: fault if asked.change and not asked.lease and asked.number % number == 0 else None


def first(count: int, fault: Fault) -> Callable[[Asked], Fault | None]:
    """A fault of the first so many changes that are not the Lease's."""
    left = [fault] * count
    return lambda asked: left.pop() if left and asked.change and not asked.lease else None


def conflicts(number: int) -> Callable[[Asked], Fault | None]:
    """409 to each so many-th change, and to every other one of a status: also to the last if none comes after it."""
    told: Counter[str] = Counter()

    def rule(asked: Asked) -> Fault | None:
        if not asked.path.endswith("/status"):
            return every(number, Fault(409))(asked)
        told[asked.path] += 1
        return Fault(409) if told[asked.path] % 2 else None

    return rule


FAULTS: dict[str, Callable[[Asked], Fault | None]] = {
    "conflicts": conflicts(3),
    "failures": every(3, Fault(500)),
    "busy": every(4, Fault(429, retry_after=1)),
    "cut before": every(3, Fault(cut=True)),
    "done but cut": every(3, Fault(cut=True, done=True)),
    "done but the answer comes too late": first(2, Fault(hang_s=12.0)),
    "watches closed each second": lambda asked: Fault(watch_s=1.0) if asked.watch else None,
    "watches that are gone": lambda asked: Fault(event=GONE) if asked.watch and asked.number % 3 else None,
}


@pytest.mark.timeout(240)
def test_a_server_that_misbehaves_only_delays(
    installation: Installation, service: Service, start: Start, faulty: FaultyServer
) -> None:
    """R037: conflicts, failures, 429, lost requests, lost answers, watches that end: create and update still arrive at
    the same objects, with no hot loop and without the process ending."""
    process = start(kubeconfig=faulty.kubeconfig)
    process.await_leading()
    port = 8100
    for name, rule in FAULTS.items():
        port += 1
        faulty.rule = rule
        begun, calls = time.monotonic(), faulty.seen["call"]
        service.write(spec__router__port=port, spec__decode__replicas=1 + port % 3)
        wait_for(lambda: service.settled() and f":{port}/" in service.found()["status"]["url"], name, 60.0)  # noqa: B023
        faulty.rule = lambda asked: None
        assert process.process.poll() is None, process.log()
        assert faulty.seen["call"] - calls < 100 + 10 * (time.monotonic() - begun), name


@pytest.mark.timeout(240)
def test_a_server_that_refuses_everything_is_not_hammered(
    installation: Installation, service: Service, start: Start, faulty: FaultyServer
) -> None:
    """429 with Retry-After on every change for ten seconds: a few calls, and all is made when it ends."""
    process = start(kubeconfig=faulty.kubeconfig)
    process.await_leading()
    faulty.rule = every(1, Fault(429, retry_after=2))
    before = faulty.seen.copy()
    service.write()
    deadline = time.monotonic() + 10.0
    wait_for(lambda: time.monotonic() > deadline, "ten seconds of refusals")
    asked = sum((faulty.seen - before).values()) - (faulty.seen - before)["lease"]
    assert asked <= 100, faulty.seen - before
    faulty.rule = lambda asked: None
    wait_for(service.settled, "the service to be ready", 60.0)


@pytest.mark.timeout(240)
def test_a_watch_that_hears_nothing_is_given_up(
    installation: Installation, service: Service, start: Start, faulty: FaultyServer
) -> None:
    """Two minutes of silence: the connection is renewed after 70 s without a bookmark, and what changed is seen."""
    faulty.rule = lambda asked: Fault(silent=True) if asked.watch else None
    process = start(kubeconfig=faulty.kubeconfig)
    process.await_leading()
    service.write()
    begun = time.monotonic()
    wait_for(lambda: faulty.seen["watch"] > 0, "watches to begin")
    faulty.rule = lambda asked: None
    wait_for(service.settled, "the service to be ready", 110.0)
    assert time.monotonic() - begun < 100.0


def serves(service: Service, port: int) -> bool:
    """Whether a service has come to rest with this router port."""
    return service.settled() and f":{port}/" in service.found()["status"]["url"]


def test_a_new_leader_does_what_fell_into_the_time_without_one(
    installation: Installation, service: Service, start: Start
) -> None:
    """B158: three services were edited and children deleted while nobody looked; no event of it ever comes."""
    process = start()
    process.await_leading()
    services = [service, *(Service(installation.server, installation.namespace, name) for name in ("second", "third"))]
    for each in services:
        each.write()
    for each in services:
        wait_for(each.settled, f"{each.name} to be ready")
    process.send(signal.SIGTERM)
    assert process.await_end(10.0) == 0
    for number, each in enumerate(services):
        each.write(spec__router__port=8200 + number)
    lost = services[0].deployment("router")
    installation.server.client.delete(lost)
    plan = services[1].child("ConfigMap", "second-plan")
    assert plan is not None
    installation.server.client.delete(plan)
    start("next").await_leading()
    for number, each in enumerate(services):
        wait_for(partial(serves, each, 8200 + number), f"{each.name} to be as asked for", 60.0)
    assert services[0].deployment("router")["metadata"]["uid"] != lost["metadata"]["uid"]
    assert services[1].child("ConfigMap", "second-plan") is not None


def test_nothing_of_the_operator_stops_a_deletion(installation: Installation, service: Service, start: Start) -> None:
    """R041: with the operator gone a service is deleted at once: no object has a finalizer. After its return nothing is
    made again."""
    process = start()
    process.await_leading()
    service.write()
    wait_for(service.settled, "the service to be ready")
    objects = [service.found(), *service.controllers.objects().values()]
    assert not [found["metadata"]["name"] for found in objects if found["metadata"].get("finalizers")]
    annotations = {name for found in objects for name in found["metadata"].get("annotations", {})}
    assert not [name for name in annotations if "kopf" in name]
    process.send(signal.SIGTERM)
    assert process.await_end(10.0) == 0
    service.delete()
    wait_for(lambda: not service.controllers.objects(), "all children to be collected")
    successor = start("second")
    successor.await_leading()
    deadline = time.monotonic() + 2.0
    wait_for(lambda: time.monotonic() > deadline, "it to have looked")
    assert not service.controllers.objects()
    assert changes(successor) == 0
