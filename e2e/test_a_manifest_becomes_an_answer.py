"""The way of a user, on a real cluster with a real model: apply, ask, scale, edit, delete. CI runs this file.

The tests share one service and run in the order of the file.
"""

from collections.abc import Iterator

import pytest

from e2e.harness.asking import ask, traffic, undisturbed
from e2e.harness.departures import UNREADY_S, departures
from e2e.harness.kubectl import Kubectl
from e2e.harness.service import Service
from e2e.harness.waiting import wait_for

pytestmark = pytest.mark.timeout(600)

LONG = 96  # tokens of an answer: some seconds, so that pods leave in the middle of it
AT_LENGTH = "Tell all that you know, in many words."


@pytest.fixture(scope="module")
def placed(hostnames: list[str]) -> dict[str, object]:
    """Prefill and decode on two nodes, so that KV crosses from one machine to another."""
    first, second = hostnames[0], hostnames[-1]
    return {
        "prefill": {"nodeSelector": {"kubernetes.io/hostname": first}},
        "decode": {"nodeSelector": {"kubernetes.io/hostname": second}},
    }


@pytest.fixture(scope="module")
def service(kubectl: Kubectl, placed: dict[str, object]) -> Iterator[Service]:
    made = Service(kubectl, "smollm2")
    made.apply(**placed)
    try:
        made.wait_ready()
        yield made
    finally:
        kubectl.delete("infsvc", "smollm2", "--wait=true")


def test_an_answer_streams_through_prefill_and_decode(service: Service) -> None:
    """One pod computes the prompt, another writes the answer, and the KV crosses between them."""
    with service.address() as address:
        answer = ask(address)
        again = ask(address, "A second prompt, about something else entirely: how deep are the lakes of Finland?")
    assert answer.whole, answer.told()
    assert again.whole, again.told()
    assert (answer.path, again.path) == ("disaggregated", "disaggregated")
    assert len(answer.text.split()) > 4
    pulled = service.metrics(service.pod("decode"))
    assert pulled["kvferry:kv_pulls_ok_total"] == 2
    assert sum(value for name, value in pulled.items() if name.startswith("kvferry:kv_recomputed_total")) == 0


def test_get_shows_what_a_user_looks_for(service: Service) -> None:
    """`kubectl get infsvc`: model, pods of each role, readiness, the endpoint."""
    heads, values = service.kubectl.run("get", "infsvc", service.name).splitlines()
    shown = dict(zip(heads.split(), values.split(), strict=True))
    assert shown["MODEL"] == "smollm2-135m-instruct"
    assert (shown["PREFILL"], shown["DECODE"], shown["READY"]) == ("1/1", "1/1", "True")
    assert shown["URL"].startswith(f"http://{service.name}-router.")


def test_scaling_touches_nothing_else(service: Service) -> None:
    """`kubectl scale` on a role adds a pod beside those that are there."""
    before = {pod["metadata"]["uid"] for role in ("prefill", "decode", "router") for pod in service.pods(role)}
    service.kubectl.run("scale", "infsvcrole", f"{service.name}-decode", "--replicas=2")
    wait_for(lambda: _ready(service, "decode") == "2/2", "two decode pods", 120, service.told)
    after = {pod["metadata"]["uid"] for role in ("prefill", "decode", "router") for pod in service.pods(role)}
    assert before < after


def test_a_smaller_scale_fails_no_answer(service: Service) -> None:
    """Answers of the decode pod that leaves go on at the other one, with their KV, token for token.

    Each question is a new one: what the other pod has computed itself, it does not pull.
    """
    with service.address() as address:
        with traffic(lambda prompt: ask(address, f"{prompt} {AT_LENGTH}", max_tokens=LONG), 4) as clients:
            busy = service.busiest()
            service.kubectl.run("annotate", "pod", busy, "controller.kubernetes.io/pod-deletion-cost=-1")  # it is to go
            (stays,) = service.legs().keys() - {busy}
            before = service.metrics(stays)
            with departures(service) as leaving:
                service.kubectl.run("scale", "infsvcrole", f"{service.name}-decode", "--replicas=1")
                (gone,) = leaving.wait_gone(1, 90)
        grown = {name: value - before.get(name, 0.0) for name, value in service.metrics(stays).items()}
        moved = [answer.prompt for answer in clients.answers if answer.resumed == ["moved"]]
        expected = {prompt: ask(address, prompt, max_tokens=LONG).text for prompt in moved}
    assert moved
    service.check(clients.answers, expected)
    assert gone.ended()["exitCode"] == 0, gone.told()
    assert gone.name == busy
    assert gone.unready_after_s <= UNREADY_S
    assert grown["kvferry:kv_pulls_ok_total"] >= 1
    assert not [name for name, value in grown.items() if name.startswith("kvferry:kv_recomputed_total") and value]
    wait_for(lambda: _ready(service, "decode") == "1/1", "the status to say so", 30, service.told)


def test_an_edit_replaces_pods_without_losing_an_answer(service: Service, placed: dict[str, object]) -> None:
    """A new revision comes up beside the old one and takes over, running answers included: KV and text are the same."""
    revision = service.seen()["status"]["revision"]
    with service.address() as address:
        expected = undisturbed(lambda prompt: ask(address, prompt, max_tokens=LONG), 3)
        with traffic(lambda prompt: ask(address, prompt, max_tokens=LONG), 2, list(expected)) as running:
            service.apply(**placed, engine={"maxModelLen": 1024})
            wait_for(
                lambda: service.seen()["status"].get("revision") != revision and service.is_ready(),
                "the new revision to be ready",
                240,
                service.told,
            )
            wait_for(lambda: len(service.pods("decode")) == 1, "the old pods to leave", 120, service.told)
        service.check(running.answers, expected)
        assert any(answer.resumed == ["moved"] for answer in running.answers)
        assert ask(address).path == "disaggregated"


def test_delete_leaves_nothing(service: Service) -> None:
    """Every object of the service goes with it, its Secret included."""
    assert len(service.children()) > 10
    service.delete()
    assert service.children() == []


def _ready(service: Service, role: str) -> str:
    return next((str(each.get("ready")) for each in service.roles() if each["name"] == role), "")
