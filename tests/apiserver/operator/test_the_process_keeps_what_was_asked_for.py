"""The process on a real API server, with the chart's rights: objects, repair, silence, names, older versions."""

import json
import time
from collections.abc import Callable

import yaml

from kvferry_operator.plan.manifests.meta import APPLIED, FIELD_MANAGER, Object
from tests.apiserver.operator.install import ROOT
from tests.apiserver.operator.process import OperatorProcess
from tests.apiserver.operator.service import Service
from tests.support.waiting import wait_for

REPAIR_S = 1.0
REST_S = 6.0


def test_the_example_becomes_a_ready_service_and_then_there_is_silence(
    running: OperatorProcess, make_service: Callable[..., Service]
) -> None:
    """`kubectl apply` of the example is all; at rest the Lease alone is asked for."""
    service = make_service("smollm2")
    service.delete()
    wait_for(lambda: not service.controllers.objects(), "the first one's children to be collected")
    example = yaml.safe_load((ROOT / "examples/smollm2.yaml").read_text())
    example["metadata"]["namespace"] = service.namespace
    service.server.client.create(example)
    wait_for(service.settled, "the example to be ready")
    table = service.server.kubectl("get", "infsvc", "smollm2", "-n", service.namespace, "--no-headers").stdout.split()
    assert table[1:5] == ["smollm2-135m-instruct", "1/1", "1/1", "True"]
    wait_for(lambda: at_rest(running), "the operator to rest")
    before = {name: value for name, value in running.metrics().items() if "operator_api_calls_total" in name}
    deadline = time.monotonic() + REST_S
    wait_for(lambda: time.monotonic() > deadline, "some seconds of rest")
    after = {name: value for name, value in running.metrics().items() if "operator_api_calls_total" in name}
    assert {name for name in after if after[name] != before.get(name)} == {
        'kvferry:operator_api_calls_total{code="200",kind="Lease",verb="PUT"}'
    }


def at_rest(process: OperatorProcess) -> bool:
    metrics = process.metrics()
    return metrics["kvferry:operator_queue_running{}"] == metrics["kvferry:operator_queue_waiting{}"] == 0


CHILDREN = [
    ("Deployment", "apps/v1", "-router", {"spec": {"replicas": 7}}),
    ("Deployment", "apps/v1", "-router", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}),
    ("Service", "v1", "-router", {"spec": {"selector": {"app.kubernetes.io/component": "evil"}}}),
    ("ConfigMap", "v1", "-plan", {"data": {"revision": "lies"}}),
    ("ServiceAccount", "v1", "-engine", {"automountServiceAccountToken": True}),
    ("PodDisruptionBudget", "policy/v1", "-decode", {"spec": {"maxUnavailable": 5}}),
    ("NetworkPolicy", "networking.k8s.io/v1", "-deny", {"spec": {"podSelector": {"matchLabels": None}}}),
    ("Ingress", "networking.k8s.io/v1", "-router", {"spec": {"rules": [{"host": "evil.example.com"}]}}),
    (
        "InferenceServiceRole",
        "serving.kvferry.dev/v1alpha1",
        "-decode",
        {"metadata": {"labels": {"app.kubernetes.io/instance": "x"}}},
    ),
]


def test_a_child_edited_or_deleted_by_hand_is_repaired_within_a_second(make_service: Callable[..., Service]) -> None:
    """Each kind of child; also one whose label was taken away, which no watch shows any more."""
    service = make_service("drift")
    wait_for(service.settled, "the service to be ready")
    client, late = service.server.client, {}
    for kind, api_version, suffix, body in CHILDREN:
        wanted = service.child(kind, f"drift{suffix}", api_version)
        assert wanted is not None
        for how in ("edited", "deleted"):
            begun = time.monotonic()
            client.patch(wanted, body) if how == "edited" else client.delete(wanted)
            check = lambda: same_spec(service.child(kind, f"drift{suffix}", api_version), wanted)  # noqa: B023, E731
            wait_for(check, f"{kind} drift{suffix}, {how}, to be as it was", 10.0)
            late[kind, how] = time.monotonic() - begun
    assert {what: seconds for what, seconds in late.items() if seconds > REPAIR_S} == {}
    wait_for(service.settled, "the service to be at rest again")


def same_spec(found: Object | None, wanted: Object) -> bool:
    """Whether an object holds again what it held."""
    if found is None:
        return False
    parts = [(one.get("spec"), one.get("data"), one["metadata"]["labels"]) for one in (found, wanted)]
    for spec, _, _ in parts:
        for name in ("clusterIP", "clusterIPs"):
            (spec or {}).pop(name, None)
    return parts[0] == parts[1] and found.get("automountServiceAccountToken") == wanted.get(
        "automountServiceAccountToken"
    )


def test_one_name_in_two_namespaces_is_two_services(make_service: Callable[..., Service]) -> None:
    """Each has its own children; deleting one leaves the other alone."""
    first, second = make_service("twin", 0), make_service("twin", 1)
    wait_for(lambda: first.settled() and second.settled(), "both to be ready")
    ours, theirs = first.controllers.objects(), second.controllers.objects()
    plain = {key for key in ours if key[0] not in ("Pod", "Secret")}
    assert plain == {key for key in theirs if key[0] not in ("Pod", "Secret")}
    assert not {found["metadata"]["uid"] for found in ours.values()} & {
        found["metadata"]["uid"] for found in theirs.values()
    }
    before = {key: found["metadata"]["resourceVersion"] for key, found in second.controllers.objects().items()}
    first.delete()
    wait_for(lambda: not first.controllers.objects(), "the first one's children to be collected")
    assert {key: found["metadata"]["resourceVersion"] for key, found in second.controllers.objects().items()} == before
    assert second.settled()


def test_a_name_of_63_characters_is_served(make_service: Callable[..., Service]) -> None:
    """Names that would be too long are cut and marked; two that differ at the end stay apart."""
    names = ["a" * 62 + last for last in "xy"]
    services = [make_service(name) for name in names]
    wait_for(lambda: all(service.settled() for service in services), "both to be ready")
    objects = services[0].controllers.objects()
    owners = [found["metadata"]["ownerReferences"][0]["name"] for found in objects.values() if found["kind"] != "Pod"]
    assert owners.count(names[0]) == owners.count(names[1]) >= 15
    assert all(len(name) <= 63 for kind, name in objects if kind != "InferenceServiceRole")


def test_objects_of_an_older_version_are_taken_over(
    running: OperatorProcess, make_service: Callable[..., Service]
) -> None:
    """What an older operator applied and this one does not ask for goes; a child of a kind it named otherwise too."""
    service = make_service("old", 2)
    wait_for(service.settled, "the service to be ready")
    client, owner = service.server.client, service.found()
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": "old",
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    marks = {"app.kubernetes.io/managed-by": "kvferry", "app.kubernetes.io/instance": "old"}
    metadata = {"namespace": service.namespace, "ownerReferences": [reference], "labels": marks}
    client.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "name": "old-notes"}, "data": {"a": "b"}},
        FIELD_MANAGER,
    )
    router = service.deployment("router")
    older: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            **metadata,
            "name": router["metadata"]["name"],
            "labels": router["metadata"]["labels"],
            "annotations": {APPLIED: "0123456789abcdef"},
        },
        "spec": {**json.loads(json.dumps(router["spec"])), "minReadySeconds": 7},
    }
    client.apply(older, FIELD_MANAGER)
    wait_for(lambda: service.child("ConfigMap", "old-notes") is None, "the older child to go")
    wait_for(lambda: "minReadySeconds" not in service.deployment("router")["spec"], "the older field to go")
    wait_for(service.settled, "the service to be ready")
    assert not [name for name in service.controllers.ended if "router" not in name]


def test_a_name_that_somebody_else_has_is_never_written(
    make_service: Callable[..., Service], running: OperatorProcess
) -> None:
    """Their ConfigMap stays as it is, and the status says which name is in the way, and that it is free when it is."""
    server, namespace = running.installation.server, running.installation.namespaces[0]
    theirs = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "taken-plan", "namespace": namespace},
        "data": {"mine": "yes"},
    }
    server.client.create(theirs)
    service = make_service("taken")
    wait_for(lambda: service.condition() == ("False", "NameTaken"), "NameTaken")
    assert "ConfigMap taken-plan exists already" in service.message()
    assert server.client.get(theirs)["data"] == {"mine": "yes"}
    server.client.delete(theirs)
    wait_for(service.settled, "the service to be ready", 40.0)


def test_a_refusal_is_told_and_does_not_delay_others(
    make_service: Callable[..., Service], running: OperatorProcess
) -> None:
    """An admission policy in the way: its words are in the status; a service beside it is ready meanwhile."""
    client, namespace = running.installation.server.client, running.installation.namespaces[1]
    name = f"no-deployments-{namespace}"
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": ["apps"],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE", "UPDATE"],
                        "resources": ["deployments"],
                    }
                ]
            },
            "validations": [{"expression": "!object.metadata.name.startsWith('bad-')", "message": "nobody likes it"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    client.create(policy)
    client.create(binding)
    probe: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "bad-x", "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
        },
    }
    from tests.support.kube_client import Refused

    def refused() -> bool:
        try:
            client.create(probe, dryRun="All")
        except Refused:
            return True
        return False

    wait_for(refused, "the policy to be enforced", 60.0)
    bad, good = make_service("bad", 1), make_service("good", 1)
    begun = time.monotonic()
    wait_for(good.settled, "the good one to be ready")
    assert time.monotonic() - begun < 5.0
    wait_for(lambda: bad.condition()[1] == "AdmissionRefused", "the refusal to be told")
    assert "nobody likes it" in bad.message()
    calls = running.calls()
    deadline = time.monotonic() + 4.0
    wait_for(lambda: time.monotonic() > deadline, "some back-off")
    assert running.calls() - calls < 40
    client.delete(binding)
    client.delete(policy)
    wait_for(bad.settled, "the bad one to be ready", 60.0)


def test_the_keys_are_written_once_and_to_nobodys_eyes(
    make_service: Callable[..., Service], running: OperatorProcess
) -> None:
    """One Secret with four keys of 64 hex digits; none of them in the log."""
    import base64

    service = make_service("keys")
    wait_for(service.settled, "the service to be ready")
    (secret,) = [
        found
        for (kind, _), found in service.controllers.objects().items()
        if kind == "Secret" and found["metadata"]["name"].startswith("keys-keys")
    ]
    values = [base64.b64decode(value).decode() for value in secret["data"].values()]
    assert len(set(values)) == 4
    assert all(len(value) == 64 for value in values)
    log = running.log_path.read_text()
    assert not [value for value in (*values, *secret["data"].values()) if value in log]
