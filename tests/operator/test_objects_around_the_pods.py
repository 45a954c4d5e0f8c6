"""Services, policies, budgets, keys and routes: owned, labelled, named for good, and no wider than needed."""

import base64
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_operator.plan import PlanError
from kvferry_operator.plan.manifests import names
from kvferry_operator.plan.manifests.meta import INSTANCE, MANAGED_BY, NAME, PART_OF
from kvferry_operator.plan.manifests.objects import objects
from kvferry_operator.plan.manifests.settings import ClusterSettings, decode_settings
from kvferry_operator.plan.manifests.support import key_secret
from kvferry_service.key_files import KEY_BYTES
from tests.operator.cluster import DEMO, KEYS, SETTINGS, UID, container_of, find, make_context, make_objects, make_owner

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SERVICE_NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
REVISION = "0123456789"


def test_every_object_is_owned_and_labelled() -> None:
    """Deleting the service takes all of it along, and every object tells whose it is."""
    for made in make_objects(spec__router={"auth": "none", "ingress": {"host": "a.b"}, "httpRoute": {"gateway": "g"}}):
        metadata = made["metadata"]
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "serving.kvferry.dev/v1alpha1",
                "kind": "InferenceService",
                "name": "demo",
                "uid": UID,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
        assert metadata["namespace"] == "ns"
        marks = metadata["labels"]
        assert (marks[NAME], marks[INSTANCE], marks[MANAGED_BY], marks[PART_OF]) == (
            "kvferry", "demo", "kvferry", "kvferry",
        )  # fmt: skip


def test_the_kinds_that_are_made() -> None:
    """Nothing more is made than the operator may write, and no object twice."""
    made = make_objects(spec__router={"auth": "none", "ingress": {"host": "a.b"}, "httpRoute": {"gateway": "g"}})
    kinds = {(one["apiVersion"], one["kind"]) for one in made}
    assert kinds == {
        ("v1", "ServiceAccount"),
        ("v1", "ConfigMap"),
        ("v1", "Service"),
        ("apps/v1", "Deployment"),
        ("policy/v1", "PodDisruptionBudget"),
        ("networking.k8s.io/v1", "NetworkPolicy"),
        ("networking.k8s.io/v1", "Ingress"),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"),
    }
    marks = [(one["kind"], one["metadata"]["name"]) for one in made]
    assert len(set(marks)) == len(marks)
    assert json.dumps(made)


def test_rendering_is_a_function() -> None:
    """The same arguments give the same objects."""
    assert make_objects(spec__model__source=DEMO) == make_objects(spec__model__source=DEMO)


def all_names(service: str) -> list[tuple[str, str]]:
    """Kind and name of everything that is made for a service."""
    made = make_objects(
        metadata__name=service,
        spec__router={"auth": "none", "ingress": {"host": "a.b"}, "httpRoute": {"gateway": "g"}},
    )
    secret = key_secret(make_owner(service), KEYS)
    roles = [("role", names.role_name(service, role)) for role in names.ROLES]
    return [*((one["kind"], one["metadata"]["name"]) for one in (*made, secret)), *roles]


@settings(deadline=None, max_examples=60)
@given(service=SERVICE_NAMES)
def test_names_fit_whatever_the_service_is_called(service: str) -> None:
    """Names of 63 characters, of digits, of one letter: all objects have legal names, none twice."""
    made = all_names(service)
    assert len(set(made)) == len(made)
    for kind, name in made:
        assert LABEL.fullmatch(name)
        assert len(name) <= (80 if kind == "role" else 63)
        assert kind != "Service" or name[0].isalpha()


SUFFIXES = (
    "prefill",
    "decode",
    "router",
    "engine",
    "plan",
    "deny",
    f"prefill-{REVISION}",
    f"decode-{REVISION}",
    "keys-0123abcd",
)


@settings(deadline=None, max_examples=300)
@given(one=SERVICE_NAMES, other=SERVICE_NAMES, tail=st.sampled_from(SUFFIXES))
def test_two_services_never_name_one_object(one: str, other: str, tail: str) -> None:
    """Also where one service is called as an object of the other would be."""
    for left, right in ((one, other), (one, f"{one}-{tail}"), (one + "a", one + "b")):
        if left != right and len(right) <= 63:
            mine = {names.child(left, suffix) for suffix in SUFFIXES}
            assert not mine & {names.child(right, suffix) for suffix in SUFFIXES}
            services = {names.service_name(left, role) for role in names.ROLES}
            assert not services & {names.service_name(right, role) for role in names.ROLES}


def test_a_long_name_is_cut_and_marked() -> None:
    """Names stay readable, and two long names that begin alike stay apart."""
    first, second = ("a" * 62 + end for end in "bc")
    assert names.child(first, "router").startswith("aaaa")
    assert names.child(first, "router") != names.child(second, "router")
    assert names.child("short", "router") == "short-router"
    assert names.role_name("a" * 63, "decode") == "a" * 63 + "-decode"
    assert names.service_name("7b", "router").startswith("s-7b-")


def test_services_lead_to_their_pods_alone() -> None:
    """A headless Service for each pool with all its ports, a common one before the router at the manifest's port."""
    made = make_objects(spec__router={"auth": "none", "port": 80, "serviceType": "LoadBalancer"})
    for role in ("prefill", "decode"):
        spec = find(made, "Service", f"demo-{role}")["spec"]
        assert spec["clusterIP"] == "None"
        assert spec["selector"] == {
            "app.kubernetes.io/name": "kvferry",
            "app.kubernetes.io/instance": "demo",
            "app.kubernetes.io/component": role,
        }
        assert {port["name"]: port["port"] for port in spec["ports"]} == {
            "http": 8000, "control": 5600, "data": 5601, "state": 5557,
        }  # fmt: skip
    spec = find(made, "Service", "demo-router")["spec"]
    assert (spec["type"], spec["ports"][0]["port"], spec["ports"][0]["targetPort"]) == ("LoadBalancer", 80, "http")


def test_selectors_match_what_they_select() -> None:
    """Budgets, Services and Deployments find the labels of the pods that are made."""
    made = make_objects()
    pods = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"]["template"]["metadata"]["labels"]
        for one in made
        if one["kind"] == "Deployment"
    }
    for one in made:
        role = one["metadata"]["labels"].get("app.kubernetes.io/component")
        chosen = one.get("spec", {}).get("selector", {})
        if role and one["kind"] != "NetworkPolicy":
            chosen = chosen.get("matchLabels", chosen)
            assert chosen.items() <= pods[role].items(), one["metadata"]["name"]


def test_budgets_take_one_pod_of_a_role_and_are_never_stuck() -> None:
    """A drain goes on where a pod is broken, and with a single pod."""
    for role in ("prefill", "decode", "router"):
        spec = find(make_objects(), "PodDisruptionBudget", f"demo-{role}")["spec"]
        assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_deployments_bring_the_new_before_the_old_leaves() -> None:
    """Also for changes that are no revision."""
    for one in make_objects():
        if one["kind"] == "Deployment":
            assert one["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
            probe = one["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
            assert one["spec"]["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


# ---- keys ----


def test_the_key_secret_holds_what_the_pods_read() -> None:
    """Four keys as the key files are written, immutable; a later service of this name has another Secret."""
    secret = key_secret(make_owner(), KEYS)
    assert secret["immutable"] is True
    texts = {name: base64.b64decode(data).decode() for name, data in secret["data"].items()}
    assert {name: bytes.fromhex(text) for name, text in texts.items()} == KEYS
    assert all(len(text) == 2 * KEY_BYTES for text in texts.values())
    assert secret["metadata"]["name"] != key_secret(make_owner(uid="other"), KEYS)["metadata"]["name"]
    args = container_of(make_objects(), "decode")
    assert not any(text in str(args) for text in texts.values())


@pytest.mark.parametrize("keys", [{}, {**KEYS, "more": b"x" * 32}, {**KEYS, "kv": b"short"}])
def test_wrong_keys_are_refused(keys: dict[str, bytes]) -> None:
    """Missing, foreign and short keys are the caller's bug."""
    with pytest.raises(ValueError, match="32 bytes for each of http, kv, state, hash"):
        key_secret(make_owner(), keys)


# ---- routes ----


def test_routes_lead_to_the_endpoint() -> None:
    """Ingress and HTTPRoute are made where the manifest asks for them, with what it says."""
    asked = {
        "auth": "none",
        "port": 9000,
        "ingress": {"host": "llm.x", "className": "n", "tlsSecretRef": {"name": "t"}, "annotations": {"a": "b"}},
        "httpRoute": {"gateway": "g", "gatewayNamespace": "gw", "sectionName": "s", "hostnames": ["*.x"]},
    }
    made = make_objects(spec__router=asked)
    ingress = find(made, "Ingress", "demo-router")
    assert ingress["metadata"]["annotations"] == {"a": "b"}
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.x"], "secretName": "t"}]
    (rule,) = ingress["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "demo-router", "port": {"number": 9000}}
    route = find(made, "HTTPRoute", "demo-router")["spec"]
    assert route["parentRefs"] == [{"name": "g", "namespace": "gw", "sectionName": "s"}]
    assert route["rules"][0]["backendRefs"] == [{"name": "demo-router", "port": 9000}]
    assert not [one for one in make_objects() if one["kind"] in ("Ingress", "HTTPRoute")]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"spec__model__source": "./model"}, "spec.model.source"),
        ({"spec__router": {"apiKeys": {"keysFile": "k"}}}, "spec.router.apiKeys.secretRef"),
    ],
)
def test_what_no_cluster_can_run_is_refused(changes: dict[str, Any], field: str) -> None:
    """An object that is older than the CRD's rules is told why it does not run."""
    context = make_context(**changes)
    with pytest.raises(PlanError, match=re.escape(field)):
        objects(context, {"prefill": 1, "decode": 1, "router": 1})


def test_routes_that_the_operator_may_not_write_are_refused() -> None:
    """The chart's values decide; the fault names the value."""
    bare = ClusterSettings(runtime_image="r", router_image="s")
    with pytest.raises(PlanError, match=r"spec\.router\.ingress: .*ingresses\.enabled"):
        make_objects(bare, spec__router={"auth": "none", "ingress": {"host": "a.b"}})
    with pytest.raises(PlanError, match=r"spec\.router\.httpRoute: .*httpRoutes\.enabled"):
        make_objects(bare, spec__router={"auth": "none", "httpRoute": {"gateway": "g"}})


def test_settings_are_strict() -> None:
    """A setting that does not exist is an error that names it."""
    assert decode_settings(b'{"runtimeImage": "r", "routerImage": "s"}').dns_namespace == "kube-system"
    with pytest.raises(ValueError, match="unknown field `runtimImage`"):
        decode_settings(b'{"runtimImage": "r", "routerImage": "s"}')
    assert SETTINGS.router_service_account == "kvferry-router"
