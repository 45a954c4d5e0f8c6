"""Every rendered profile of the chart keeps the hardening bar: pods, rights, network, images, tokens."""

import itertools
import json
from functools import cache
from typing import Any

import pytest

from kvferry_operator.plan.manifests.settings import decode_settings
from tests.apiserver.chart.values import DIGEST, PROFILES
from tests.operator.network import End, Network, pod_end
from tests.operator.pod_security import beyond, violations
from tests.operator.test_chart import OPERATOR_RIGHTS, OPTIONAL_RIGHTS
from tests.operator.test_the_network_matrix_is_exact import DNS, METADATA, PORTS, STRANGERS
from tests.support.helm import Helm
from tests.support.kube_client import Object

CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
KINDS = CLUSTER_WIDE | {
    "Role", "RoleBinding", "ServiceAccount", "ConfigMap", "Deployment", "PodDisruptionBudget", "NetworkPolicy",
}  # fmt: skip
RELEASE = "kvferry-system"
FLOWS = tuple(itertools.product(PORTS, ("TCP", "UDP")))
Rights = dict[tuple[str, str], set[str]]


class Rendered:
    """One profile's objects."""

    def __init__(self, objects: list[Object], values: dict[str, Any]) -> None:
        self.objects = objects
        self.values = values

    def of_kind(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    @property
    def pod(self) -> Object:
        (deployment,) = self.of_kind("Deployment")
        spec: Object = deployment["spec"]["template"]["spec"]
        return spec


@cache
def render(helm: Helm, name: str) -> Rendered:
    return Rendered(helm.template(PROFILES[name], namespace=RELEASE), PROFILES[name])


@pytest.fixture(params=PROFILES)
def rendered(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    """Read only: all tests of a profile have the same objects."""
    return render(helm, request.param)


def test_objects_are_named_once_and_placed(rendered: Rendered) -> None:
    """Only kinds that are expected, each object once, each with its namespace, all with the release's labels."""
    marks = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in rendered.objects]
    assert len(set(marks)) == len(marks)
    assert {kind for kind, _, _ in marks} <= KINDS
    assert not [mark for mark in marks if (mark[0] in CLUSTER_WIDE) == bool(mark[1])]
    for one in rendered.objects:
        assert one["metadata"]["labels"]["app.kubernetes.io/part-of"] == "kvferry"


def test_the_pod_is_restricted(rendered: Rendered) -> None:
    """The Pod Security Standard `restricted`, and what we ask for beyond it."""
    assert not [*violations(rendered.pod), *beyond(rendered.pod)]
    container = rendered.pod["containers"][0]
    assert {"livenessProbe", "readinessProbe", "startupProbe"} <= container.keys()
    assert container["resources"]["limits"]["memory"]
    (token,) = [volume["projected"]["sources"] for volume in rendered.pod["volumes"] if "projected" in volume]
    assert token[0]["serviceAccountToken"]["expirationSeconds"] <= 3600


def rights(roles: list[Object]) -> Rights:
    """Verbs by group and resource; a rule for single names is kept apart by them."""
    out: Rights = {}
    for role in roles:
        for rule in role["rules"]:
            assert rule.keys() <= {"apiGroups", "resources", "verbs", "resourceNames"}
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    names = ",".join(rule.get("resourceNames", ()))
                    out.setdefault((group, f"{resource}/{names}" if names else resource), set()).update(rule["verbs"])
    return out


def test_rights_are_the_list(rendered: Rendered) -> None:
    """In each watched namespace exactly the operator's list, in the release's the Lease, for routers EndpointSlices."""
    expected = dict(OPERATOR_RIGHTS)
    for value, name in (("ingresses", "ingresses"), ("httpRoutes", "httproutes")):
        if rendered.values.get(value, {}).get("enabled"):
            expected |= OPTIONAL_RIGHTS[name]
    account = rendered.values.get("settings", {}).get("routerServiceAccount", "kvferry-router")
    watched = rendered.values.get("watchNamespaces", ["default"])
    roles = {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in rendered.of_kind("Role")}
    if rendered.values.get("watchAllNamespaces"):
        assert rights(rendered.of_kind("ClusterRole")) == expected
        routers = rendered.values.get("routerNamespaces", [])
        watched = []
    else:
        assert not rendered.of_kind("ClusterRole")
        assert not rendered.of_kind("ClusterRoleBinding")
        routers = watched
    for namespace in watched:
        assert rights([roles.pop((namespace, "kvferry"))]) == expected
    for namespace in routers:
        slices = {("discovery.k8s.io", "endpointslices"): {"get", "list", "watch"}}
        assert rights([roles.pop((namespace, account))]) == slices
    leases = ("coordination.k8s.io", "leases")
    assert rights([roles.pop((RELEASE, "kvferry-lease"))]) == {
        leases: {"create"},
        (leases[0], f"{leases[1]}/kvferry-operator"): {"get", "update", "patch"},
    }
    assert not roles
    assert "--lease-name=kvferry-operator" in rendered.pod["containers"][0]["args"]


def test_bindings_bind_the_accounts_of_the_chart_alone(rendered: Rendered) -> None:
    """Each binding has one subject: a ServiceAccount that the chart makes; no group, no user."""
    accounts = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in rendered.of_kind("ServiceAccount")}
    bindings = [*rendered.of_kind("RoleBinding"), *rendered.of_kind("ClusterRoleBinding")]
    assert bindings
    for binding in bindings:
        (subject,) = binding["subjects"]
        assert subject["kind"] == "ServiceAccount"
        assert (subject["namespace"], subject["name"]) in accounts
        assert binding["roleRef"]["name"] == binding["metadata"]["name"]
    for account in rendered.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_the_network_is_closed_but_for_what_is_needed(rendered: Rendered) -> None:
    """In: metrics, for the namespaces that are named. Out: DNS, and the API server's ports everywhere but at metadata
    addresses. Every pair of ends is tried."""
    settings = rendered.values.get("settings", {})
    if settings.get("networkPolicies") is False:
        assert not rendered.of_kind("NetworkPolicy")
        return
    (deployment,) = rendered.of_kind("Deployment")
    operator, network = pod_end(deployment, "10.2.0.1"), Network(rendered.objects)
    assert network.holds(operator)
    dns, monitoring = settings.get("dnsNamespace", "kube-system"), settings.get("monitoringNamespaces", [])
    namespaces = {dns, "monitoring", RELEASE, "elsewhere", *monitoring}
    pods = [End(name, f"10.1.0.{number}", name) for number, name in enumerate(sorted(namespaces))]
    open_ports = {(port, "TCP") for port in settings.get("apiServerPorts", [443, 6443])}
    for other in (*pods, *(one for one in STRANGERS if not one.namespace), *METADATA):
        out = {flow for flow in FLOWS if network.allows(operator, other, *flow)}
        expected = set() if other in METADATA else open_ports
        assert out == expected | (DNS if other.namespace == dns else set()), other.name
        into = {flow for flow in FLOWS if network.allows(other, operator, *flow)}
        assert into == ({(9090, "TCP")} if other.namespace in monitoring else set()), other.name


def test_images_are_as_the_values_say(rendered: Rendered) -> None:
    """A digest wins over a tag; without either it is the chart's release, never `latest`."""
    (settings,) = [one for one in rendered.of_kind("ConfigMap") if "settings.json" in one["data"]]
    decoded = decode_settings(settings["data"]["settings.json"].encode())
    images = [rendered.pod["containers"][0]["image"], decoded.runtime_image, decoded.router_image]
    if "images" in rendered.values:
        assert all(image.endswith(f"@{DIGEST}") for image in images)
    else:
        assert images == ["kvferry/operator:0.1.0", "kvferry/runtime:0.1.0", "kvferry/router:0.1.0"]


def test_settings_reach_the_operator_as_they_were_given(rendered: Rendered) -> None:
    """What the operator decodes holds every given setting; an edit of it starts the pods anew."""
    (config,) = rendered.of_kind("ConfigMap")
    found = json.loads(config["data"]["settings.json"])
    given = rendered.values.get("settings", {})
    assert given.items() <= found.items()
    (deployment,) = rendered.of_kind("Deployment")
    assert len(deployment["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]) == 64


def test_the_operators_arguments_are_those_that_it_reads(rendered: Rendered, tmp_path: Any) -> None:
    """Its command line accepts what the chart passes."""
    from kvferry_operator.shell.options import parse_options

    (config,) = rendered.of_kind("ConfigMap")
    path = tmp_path / "settings.json"
    path.write_text(config["data"]["settings.json"])
    arguments = [
        argument.replace("$(POD_NAMESPACE)", RELEASE)
        .replace("$(POD_NAME)", "pod-0")
        .replace("/etc/kvferry/settings.json", str(path))
        for argument in rendered.pod["containers"][0]["args"]
    ]
    options = parse_options(arguments)
    everywhere = rendered.values.get("watchAllNamespaces", False)
    assert options.namespaces == (None if everywhere else tuple(rendered.values.get("watchNamespaces", ["default"])))


def test_releases_share_nothing(helm: Helm) -> None:
    """Two releases with other names in one namespace, for other namespaces, render no object of one name."""
    first = helm.template({"watchNamespaces": ["team-a"]}, release="kvferry")
    second = helm.template({"watchNamespaces": ["team-b"], "crds": {"install": False}}, release="other")
    names = [
        {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects}
        for objects in (first, second)
    ]
    assert not names[0] & names[1]
    leases = [
        next(argument for argument in pod["args"] if argument.startswith("--lease-name"))
        for objects in (first, second)
        for one in objects
        if one["kind"] == "Deployment"
        for pod in one["spec"]["template"]["spec"]["containers"]
    ]
    assert len(set(leases)) == 2


@pytest.mark.parametrize("release", ["k", "a" * 53, "kvferry", "my-kvferry", "9"])
def test_any_name_of_a_release_will_do(helm: Helm, release: str) -> None:
    """Names stay within 63 characters and end with a letter or digit."""
    for one in helm.template(release=release):
        name = one["metadata"]["name"]
        assert one["kind"] == "CustomResourceDefinition" or (len(name) <= 63 and name[-1].isalnum())
