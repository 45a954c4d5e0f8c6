"""The rendered roles on a real API server: each account may do exactly what the list says, asked right by right."""

import secrets
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from kvferry_operator.plan.effects import Apply, Create, Delete, Patch
from tests.apiserver.performer import RealCluster
from tests.operator.manifests import make_manifest
from tests.operator.test_chart import KVFERRY, OPERATOR_RIGHTS, OPTIONAL_RIGHTS, SIX
from tests.support.api_server import ApiServer
from tests.support.cluster_tools import tools_or_skip
from tests.support.helm import Helm
from tests.support.kube_client import KubeClient, Object, Refused

Right = tuple[str, str, str]  # group, resource (with subresource), verb
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
# Verbs of their own, on what they are dangerous on.
SPECIAL: tuple[Right, ...] = (
    ("rbac.authorization.k8s.io", "roles", "bind"),
    ("rbac.authorization.k8s.io", "roles", "escalate"),
    ("rbac.authorization.k8s.io", "clusterroles", "bind"),
    ("rbac.authorization.k8s.io", "clusterroles", "escalate"),
    ("", "serviceaccounts", "impersonate"),
    ("", "users", "impersonate"),
    ("", "groups", "impersonate"),
    ("certificates.k8s.io", "signers", "approve"),
    ("security.openshift.io", "securitycontextconstraints", "use"),
    ("policy", "podsecuritypolicies", "use"),
    ("", "pods/eviction", "create"),
    ("", "nodes/proxy", "get"),
    ("serving.kvferry.dev", "inferenceservices", "*"),
    ("*", "*", "*"),
)
# What everybody who is authenticated may do: ask about himself.
EVERYBODY: frozenset[Right] = frozenset(
    (group, resource, "create")
    for group, resource in (
        ("authorization.k8s.io", "selfsubjectaccessreviews"),
        ("authorization.k8s.io", "selfsubjectrulesreviews"),
        ("authentication.k8s.io", "selfsubjectreviews"),
    )
)
LEASE = "kvferry-operator"


class Release:
    """The roles of one profile, applied in namespaces of their own."""

    def __init__(self, server: ApiServer, helm: Helm, values: dict[str, Any]) -> None:
        self.server = server
        self.home, self.watched, self.other = (server.namespace() for _ in range(3))
        self.name = f"kvferry-{secrets.token_hex(3)}"
        where = {"routerNamespaces" if values.get("watchAllNamespaces") else "watchNamespaces": [self.watched]}
        objects = helm.template({"crds": {"install": False}, **values, **where}, release=self.name, namespace=self.home)
        kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
        server.apply_all([one for one in objects if one["kind"] in kinds])

    def operator(self) -> KubeClient:
        return self.server.client_of(self.server.token_for(self.home, self.name))

    def router(self) -> KubeClient:
        return self.server.client_of(self.server.token_for(self.watched, "kvferry-router"))


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """One version will do: both render the same objects."""
    return Helm(tools_or_skip("helm"), "helm4", tmp_path_factory.mktemp("helm"))


@cache
def every_right(server: ApiServer) -> tuple[Right, ...]:
    """Each resource and subresource that the server has, with each verb; and verbs that no listing tells of."""
    resources: set[tuple[str, str]] = set()
    groups = ["v1", *(one["preferredVersion"]["groupVersion"] for one in server.client.call("GET", "/apis")["groups"])]
    for version in groups:
        group = version.rpartition("/")[0]
        found = server.client.call("GET", f"/{'apis' if group else 'api'}/{version}")["resources"]
        resources |= {(group, one["name"]) for one in found}
    # Not listed, or not installed here.
    resources |= {(KVFERRY, "inferenceservices/finalizers"), ("gateway.networking.k8s.io", "httproutes")}
    assert {("", "secrets"), ("", "pods/exec"), ("", "nodes/proxy"), (KVFERRY, "inferenceservices/status")} <= resources
    return (*((group, resource, verb) for group, resource in sorted(resources) for verb in VERBS), *SPECIAL)


def may(client: KubeClient, right: Right, namespace: str, name: str = "") -> bool:
    """`kubectl auth can-i`."""
    group, whole, verb = right
    resource, _, subresource = whole.partition("/")
    asked = {
        "group": group, "resource": resource, "subresource": subresource, "verb": verb, "namespace": namespace,
        "name": name,
    }  # fmt: skip
    review: Object = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    allowed: bool = client.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)["status"][
        "allowed"
    ]
    return allowed


def expected(rights: dict[tuple[str, str], set[str]]) -> set[Right]:
    return {(group, resource, verb) for (group, resource), verbs in rights.items() for verb in verbs}


def allowed(client: KubeClient, server: ApiServer, namespace: str) -> set[Right]:
    """All that the account may do in a namespace (or in none: everywhere), beyond what everybody may."""
    return {right for right in every_right(server) if may(client, right, namespace)} - EVERYBODY


@pytest.mark.parametrize("optional", [False, True], ids=["bare", "with ingresses and routes"])
def test_the_operator_in_a_watched_namespace(api_server: ApiServer, helm: Helm, optional: bool) -> None:
    """Exactly the list, of all resources and verbs that the server knows; nothing anywhere else but its Lease."""
    values = {name: {"enabled": optional} for name in ("ingresses", "httpRoutes")}
    release = Release(api_server, helm, values)
    wanted = dict(OPERATOR_RIGHTS)
    if optional:
        wanted |= OPTIONAL_RIGHTS["ingresses"] | OPTIONAL_RIGHTS["httproutes"]
    client = release.operator()
    assert allowed(client, api_server, release.watched) == expected(wanted)
    assert allowed(client, api_server, release.other) == set()
    assert allowed(client, api_server, "") == set()
    assert allowed(client, api_server, release.home) == {("coordination.k8s.io", "leases", "create")}


def test_the_operators_lease_and_no_other(api_server: ApiServer, helm: Helm) -> None:
    """Get, update and patch of one Lease in the release's namespace; neither another nor elsewhere, and no deletion."""
    release = Release(api_server, helm, {})
    client = release.operator()
    own = f"{release.name}-operator"
    for verb in VERBS:
        right = ("coordination.k8s.io", "leases", verb)
        assert may(client, right, release.home, own) == (verb in ("get", "update", "patch", "create"))
        assert may(client, right, release.home, "another") == (verb == "create")
        assert not may(client, right, release.watched, own)


def test_the_operator_of_all_namespaces(api_server: ApiServer, helm: Helm) -> None:
    """The same list, in each namespace; still no resource that belongs to no namespace."""
    release = Release(api_server, helm, {"watchAllNamespaces": True})
    client = release.operator()
    for namespace in (release.watched, release.other):
        assert allowed(client, api_server, namespace) == expected(OPERATOR_RIGHTS)
    namespaced = {(group, resource) for group, resource, _ in allowed(client, api_server, "")}
    assert namespaced == OPERATOR_RIGHTS.keys()


def test_routers_see_endpoints_of_their_namespace(api_server: ApiServer, helm: Helm) -> None:
    """Get, list and watch of EndpointSlices there; nothing else, and nothing elsewhere."""
    release = Release(api_server, helm, {})
    client = release.router()
    slices = {("discovery.k8s.io", "endpointslices", verb) for verb in ("get", "list", "watch")}
    assert allowed(client, api_server, release.watched) == slices
    for namespace in (release.home, release.other, ""):
        assert allowed(client, api_server, namespace) == set()


def test_engines_may_nothing(api_server: ApiServer, helm: Helm) -> None:
    """The account that the operator makes for engine pods is bound to no role."""
    release = Release(api_server, helm, {})
    api_server.service_account(release.watched, "demo-engine")
    client = api_server.client_of(api_server.token_for(release.watched, "demo-engine"))
    assert allowed(client, api_server, release.watched) == set()


def test_the_list_is_enough_for_a_whole_life(api_server: ApiServer, helm: Helm) -> None:
    """Created, scaled, rolled out, shrunk: no write that is decided is forbidden to the operator's own account. Owners
    that block their deletion are checked as strictly as some distributions do."""
    release = Release(api_server, helm, {"ingresses": {"enabled": True}})
    assert "OwnerReferencesPermissionEnforcement" in api_server.admission
    manifest = make_manifest(spec__router={"auth": "none", "ingress": {"host": "a.example"}})
    cluster = RealCluster(api_server, manifest, release.watched, release.operator())
    for changes in ({}, {"spec__decode__replicas": 3}, {"spec__engine": {"dtype": "float32"}}, {"spec__prefill": ...}):
        if changes:
            cluster.edit(make_manifest(**changes))
        cluster.settle()
        assert cluster.faults == ()
    assert {type(effect) for effect in cluster.log} == {Apply, Create, Delete, Patch}


def forbidden(release: Release) -> Iterator[tuple[str, str, Object | None]]:
    """Calls that would undo the list, were they allowed."""
    core, rbac = f"/api/v1/namespaces/{release.watched}", "/apis/rbac.authorization.k8s.io/v1"
    yield "GET", f"{core}/secrets", None
    yield "GET", f"{core}/secrets/any", None
    yield "DELETE", f"{core}/secrets/any", None
    yield "POST", f"{core}/pods/any/exec?command=sh", None
    yield "GET", f"{core}/pods/any/log", None
    yield "POST", f"{core}/serviceaccounts/default/token", {"apiVersion": "authentication.k8s.io/v1", "spec": {}}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "x"}, "rules": []}
    yield "POST", f"{rbac}/namespaces/{release.watched}/roles", role
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "x"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": release.name, "namespace": release.home}],
    }
    yield "POST", f"{rbac}/namespaces/{release.watched}/rolebindings", binding
    service = f"/apis/{KVFERRY}/v1alpha1/namespaces/{release.watched}/inferenceservices"
    yield "POST", service, {"apiVersion": f"{KVFERRY}/v1alpha1", "kind": "InferenceService", "metadata": {"name": "x"}}
    yield "DELETE", f"{service}/any", None
    yield "GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", None
    yield "GET", "/api/v1/nodes", None
    yield "GET", "/api/v1/namespaces", None


def test_what_is_not_in_the_list_is_refused_when_it_is_done(api_server: ApiServer, helm: Helm) -> None:
    """Not only told so by a review: the calls themselves are forbidden."""
    release = Release(api_server, helm, {"watchAllNamespaces": True})
    client = release.operator()
    for method, path, body in forbidden(release):
        with pytest.raises(Refused) as caught:
            client.call(method, path, body)
        assert caught.value.code == 403, (method, path, caught.value)


def test_kubectl_lists_the_same(api_server: ApiServer, helm: Helm) -> None:
    """`kubectl auth can-i --list` as the operator names each resource of the list, and Secrets with `create` alone."""
    release = Release(api_server, helm, {})
    config = api_server.kubeconfig_for(release.home, release.name)
    told = api_server.kubectl("auth", "can-i", "--list", "-n", release.watched, kubeconfig=config).stdout
    rows = {line.split()[0]: line.rpartition("[")[2].rstrip("]").split() for line in told.splitlines()[1:]}
    for (group, resource), verbs in OPERATOR_RIGHTS.items():
        name, _, subresource = resource.partition("/")
        shown = ".".join(part for part in (name, group) if part) + (f"/{subresource}" if subresource else "")
        assert set(rows[shown]) == verbs, shown
    assert rows["secrets"] == ["create"]
    assert set(rows["deployments.apps"]) == SIX
