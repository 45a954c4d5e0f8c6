"""Rendered objects meet real defaulting, validation, server-side apply and Pod Security."""

import json
from functools import cache
from typing import Any

import pytest
import yaml

from kvferry_operator.api import load_manifest
from kvferry_operator.api.cluster import load_object
from kvferry_operator.plan.diff import first_difference
from kvferry_operator.plan.effects import Apply, Create, Delete, Effect, Patch
from kvferry_operator.plan.manifests.meta import APPLIED, COMPONENT, Object
from kvferry_operator.plan.manifests.names import keys_name
from tests.apiserver.performer import GATEWAY, RealCluster, route_crd
from tests.operator.cluster import SETTINGS
from tests.operator.manifests import make_manifest
from tests.operator.profiles import PRIORITY, PROFILES
from tests.support.api_server import ApiServer

NEW_REVISION = {"spec__engine": {"dtype": "float32"}}


@pytest.fixture(scope="module", autouse=True)
def surroundings(api_server: ApiServer) -> None:
    """What profiles refer to and no namespace holds."""
    api_server.client.apply(route_crd())
    api_server.await_kinds(GATEWAY, "HTTPRoute")
    api_server.client.apply(
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": PRIORITY}, "value": 1}
    )


class Life:
    """A service of one profile from its creation to rest, in a namespace that enforces Pod Security; tests share it."""

    def __init__(self, server: ApiServer, manifest: Object) -> None:
        self.server, self.manifest = server, manifest
        namespace = server.namespace(labels={"pod-security.kubernetes.io/enforce": "restricted"})
        server.service_account(namespace, SETTINGS.router_service_account)
        self.cluster = RealCluster(server, manifest, namespace)
        self.first = self.cluster.reconcile()
        self.faults = self.cluster.faults
        self.second = self.cluster.reconcile()
        self.third = self.cluster.decide()
        self.cluster.settle()
        self.cluster.reconcile()  # the status of what was reported last


@cache
def live(server: ApiServer, profile: str) -> Life:
    return Life(server, make_manifest(**PROFILES[profile]))


@pytest.fixture(params=PROFILES)
def life(request: pytest.FixtureRequest, api_server: ApiServer) -> Life:
    return live(api_server, request.param)


def test_every_object_is_accepted_and_never_written_twice(life: Life) -> None:
    """One pass writes all, and then nothing is left to do, neither at once nor later: no object differs from what was
    asked for. Nor does a dry run of the same apply change anything."""
    assert life.faults == ()
    assert [said(effect) for effect in life.second.effects] == []
    assert [said(effect) for effect in life.third.effects] == []
    client = life.server.client
    for effect in life.first.effects:
        if isinstance(effect, Apply):
            before = client.get(effect.object)
            again = client.apply(effect.object, effect.manager, dryRun="All", fieldValidation="Strict")
            assert before["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]
            assert first_difference(unstamped(effect.object), again) is None
    assert [said(effect) for effect in life.cluster.decide().effects] == []


def kind_of(effect: Effect) -> str:
    kind: str = effect.object["kind"] if isinstance(effect, Create | Apply) else effect.kind
    return kind


def said(effect: Effect) -> str:
    return f"{kind_of(effect)}: {getattr(effect, 'why', 'create')}"


def unstamped(applied: Object) -> Object:
    """The object before it was marked with its own hash."""
    metadata = {key: value for key, value in applied["metadata"].items() if key != "annotations"}
    rest = {k: v for k, v in applied["metadata"]["annotations"].items() if k != APPLIED}
    return {**applied, "metadata": metadata | ({"annotations": rest} if rest else {})}


def test_the_server_and_the_loader_read_one_manifest_alike(life: Life) -> None:
    """What the server has defaulted and stored is, to the operator, what `kvferry up` reads from the file."""
    local = load_manifest(yaml.safe_dump(life.manifest), "f.yaml")
    assert load_object(life.cluster.found()).spec == local.spec


def test_the_status_is_kept_whole(life: Life) -> None:
    """No field that is written to a status is unknown to its CRD, and what was written is read back."""
    decision = life.cluster.decide()
    assert life.cluster.found()["status"] == decision.status
    assert decision.role_statuses == {}


def test_pods_of_every_template_are_restricted(life: Life) -> None:
    """A namespace that enforces the Pod Security Standard `restricted` takes them; the router's alone has a token."""
    children = [child for child in life.cluster.children() if child["kind"] == "Deployment"]
    assert len(children) >= 2
    for child in children:
        template, component = child["spec"]["template"], child["metadata"]["labels"][COMPONENT]
        metadata = {**template["metadata"], "name": f"try-{component}", "namespace": life.cluster.namespace}
        pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}
        made = life.server.client.create(pod, dryRun="All", fieldValidation="Strict")
        tokens = [volume for volume in made["spec"]["volumes"] if "projected" in volume]
        assert len(tokens) == (component == "router")


def test_a_new_revision_and_back(api_server: ApiServer, namespace: str) -> None:
    """A whole rollout comes to rest with the old Deployments gone, and the way back as well."""
    cluster = RealCluster(api_server, make_manifest(spec__decode__replicas=2), namespace)
    cluster.settle()
    before = names(cluster, "Deployment")
    cluster.edit(make_manifest(spec__decode__replicas=2, **NEW_REVISION))
    cluster.settle()
    assert len(names(cluster, "Deployment")) == 3
    assert len(before & names(cluster, "Deployment")) == 1
    cluster.edit(make_manifest(spec__decode__replicas=2))
    cluster.settle()
    assert names(cluster, "Deployment") == before


def names(cluster: RealCluster, kind: str) -> set[str]:
    return {child["metadata"]["name"] for child in cluster.children() if child["kind"] == kind}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("placed", {}),
        ("odd sizes", {}),
        ("variables", {}),
        ("ingress", {}),
        ("route", {}),
        ("node port", {"spec__router__port": 9000}),
        ("prefill and decode", {"spec__prefill": ...}),
        ("gated hub model", {"spec__model": {"name": "org/model:v1", "source": "org/other"}}),
    ],
)
def test_what_is_no_longer_asked_for_goes(
    api_server: ApiServer, namespace: str, first: str, then: dict[str, Any]
) -> None:
    """After an edit the objects are those that the new manifest alone would have made."""
    cluster = RealCluster(api_server, make_manifest(**PROFILES[first]), namespace)
    cluster.settle()
    cluster.edit(make_manifest(**then))
    cluster.settle()
    fresh = RealCluster(api_server, make_manifest(**then), api_server.namespace())
    fresh.settle()
    assert bare(cluster) == bare(fresh)


# Chosen by the server, and different each time.
OWN_EACH_TIME = {"clusterIP", "clusterIPs", "nodePort", "healthCheckNodePort"}


def bare(cluster: RealCluster) -> dict[tuple[str, str], Any]:
    """What the server has of each object: without ids, times and addresses, and with the namespace's name left out."""
    keys = keys_name(cluster.name, cluster.found()["metadata"]["uid"])
    out = {}
    for child in cluster.children():
        metadata = child["metadata"]
        marks = {key: value for key, value in metadata.get("annotations", {}).items() if key != APPLIED}
        rest = {key: value for key, value in child.items() if key not in ("metadata", "status")}
        text = json.dumps([metadata["labels"], marks, without(rest, OWN_EACH_TIME)])
        out[child["kind"], metadata["name"]] = json.loads(text.replace(cluster.namespace, "NS").replace(keys, "KEYS"))
    return out


def without(value: Any, fields: set[str]) -> Any:
    """The value without some fields, however deep."""
    if isinstance(value, dict):
        return {key: without(inner, fields) for key, inner in value.items() if key not in fields}
    return [without(item, fields) for item in value] if isinstance(value, list) else value


def test_others_may_scale(api_server: ApiServer, namespace: str) -> None:
    """`kubectl scale` of the role object reaches the Deployment, and nothing takes it back."""
    cluster = RealCluster(api_server, make_manifest(), namespace)
    cluster.settle()
    api_server.kubectl("scale", "-n", namespace, "infsvcrole", "demo-decode", "--replicas=4")
    cluster.settle()
    (found,) = [c for c in cluster.children() if c["kind"] == "Deployment" and "-decode-" in c["metadata"]["name"]]
    assert found["spec"]["replicas"] == 4
    cluster.edit(make_manifest(spec__router__port=9000))
    cluster.settle()
    assert api_server.client.get(found)["spec"]["replicas"] == 4


def test_fields_of_others_stay_and_ours_come_back(api_server: ApiServer, namespace: str) -> None:
    """Another manager's label and annotation stay; what it changes of ours is repaired."""
    cluster = RealCluster(api_server, make_manifest(), namespace)
    cluster.settle()
    (router,) = [c for c in cluster.children() if c["kind"] == "Service" and c["metadata"]["name"] == "demo-router"]
    api_server.client.patch(
        router,
        {"metadata": {"annotations": {"theirs": "1"}}, "spec": {"selector": {"app.kubernetes.io/component": "x"}}},
    )
    cluster.log.clear()
    cluster.settle()
    (effect,) = cluster.log
    assert isinstance(effect, Apply)
    assert effect.why == "spec.selector.app.kubernetes.io/component: router is wanted, x is there"
    repaired = api_server.client.get(router)
    assert repaired["metadata"]["annotations"]["theirs"] == "1"
    assert repaired["spec"]["selector"]["app.kubernetes.io/component"] == "router"


def test_everything_that_is_decided_was_tried(api_server: ApiServer, namespace: str) -> None:
    """The lives above perform each kind of effect."""
    cluster = RealCluster(api_server, make_manifest(), namespace)
    cluster.settle()
    cluster.edit(make_manifest(**NEW_REVISION, spec__decode__replicas=2))
    cluster.settle()
    assert {type(effect) for effect in cluster.log} == {Create, Apply, Patch, Delete}
