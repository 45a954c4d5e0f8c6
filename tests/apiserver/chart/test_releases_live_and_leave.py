"""A release on a real API server: installed, upgraded, rolled back, uninstalled, by Helm 3 and by Helm 4.

No controller runs here, so that nothing waits for pods: what is judged are the objects.
"""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry_operator.api.service import API_VERSION
from tests.apiserver.chart.values import PROFILES
from tests.operator.manifests import make_manifest
from tests.support.api_server import ApiServer
from tests.support.cluster_tools import tools_or_skip
from tests.support.helm import CHART, ROOT, Helm, HelmError
from tests.support.kube_client import Object, Refused
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(300)

NUDGE_S = 10.0

RELEASE, HOME = "kvferry", "kvferry-system"
CRD = "inferenceservices.serving.kvferry.dev"
CRDS = (CRD, "inferenceserviceroles.serving.kvferry.dev")


class Cluster:
    """A server into which releases go, and what is looked at in it."""

    def __init__(self, server: ApiServer, helm: Helm) -> None:
        self.server = server
        self.helm = helm

    def run(self, verb: str, release: str = RELEASE, *options: str, chart: Path = CHART, **values: Any) -> str:
        """`helm install` or `helm upgrade` of the chart."""
        return self.helm(verb, release, str(chart), f"--namespace={HOME}", *options, values=values)

    def install(self, release: str = RELEASE, *options: str, chart: Path = CHART, **values: Any) -> str:
        return self.run("install", release, "--create-namespace", *options, chart=chart, **values)

    def uninstall(self, release: str = RELEASE, *options: str) -> str:
        return self.helm("uninstall", release, f"--namespace={HOME}", *options)

    def find(self, api_version: str, kind: str, name: str, namespace: str = HOME) -> Object | None:
        wanted = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": namespace}}
        return self.server.client.find(wanted)

    def deployment(self, release: str = RELEASE) -> Object | None:
        return self.find("apps/v1", "Deployment", release)

    def crd(self) -> Object | None:
        return self.find("apiextensions.k8s.io/v1", "CustomResourceDefinition", CRD)

    def service(self, name: str = "demo") -> Object | None:
        return self.find(API_VERSION, "InferenceService", name, "default")

    def apply_service(self, **changes: Any) -> Object:
        self.server.await_kinds(API_VERSION, "InferenceService", "InferenceServiceRole")
        wanted = make_manifest(**changes)
        wanted["metadata"]["namespace"] = "default"
        return self.server.client.apply(wanted, "kubectl", fieldValidation="Strict")

    def clear(self, *releases: str) -> None:
        """Take away everything that a test may have left."""
        for release in releases:
            self.uninstall(release, "--ignore-not-found")
        client = self.server.client
        crds: list[Object] = [
            {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": name}}
            for name in CRDS
        ]
        for crd in crds:
            if client.find(crd) is not None:
                client.delete(crd)
        nudged_at = time.monotonic()

        def are_gone() -> bool:
            """A server that failed to take one away tries again after ever longer pauses, and at once on a change."""
            nonlocal nudged_at
            if client.request("GET", f"/apis/{API_VERSION}")[0] == 404:
                return True
            if time.monotonic() - nudged_at > NUDGE_S:
                nudged_at = time.monotonic()
                for crd in crds:
                    if client.find(crd) is not None:
                        client.patch(crd, {"metadata": {"annotations": {"tests/nudged": str(nudged_at)}}})
            return False

        wait_for(are_gone, "the CRDs to be gone", 180)


@pytest.fixture(params=["helm3", "helm4"])
def cluster(request: pytest.FixtureRequest, bare_api_server: ApiServer, tmp_path: Path) -> Iterator[Cluster]:
    """No release and no CRD at the beginning and at the end."""
    helm = Helm(tools_or_skip("helm"), request.param, tmp_path, bare_api_server.admin)
    made = Cluster(bare_api_server, helm)
    yield made
    made.clear(RELEASE, "other")


def edited(tmp_path: Path, edit: Any) -> Path:
    """A copy of the chart whose first CRD is changed: an earlier or later release."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    path = chart / "files" / "crds" / "serving.kvferry.dev_inferenceservices.yaml"
    crd = yaml.safe_load(path.read_text())
    edit(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])
    path.write_text(yaml.safe_dump(crd))
    return chart


def fields(crd: Object | None) -> set[str]:
    assert crd is not None
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return set(schema["properties"]["spec"]["properties"])


def test_the_way_of_a_new_user(cluster: Cluster) -> None:
    """Installed into a namespace that did not exist, the notes tell the next command, which works as it is printed."""
    notes = cluster.install()
    deployment = cluster.deployment()
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 1
    commands = [line.strip() for line in notes.splitlines() if line.startswith("    kubectl ")]
    apply, watch = commands[0], commands[1]
    assert apply == "kubectl apply -n default -f examples/smollm2.yaml"
    cluster.server.await_kinds(API_VERSION, "InferenceService", "InferenceServiceRole")
    cluster.server.kubectl(*apply.replace("examples/", f"{ROOT}/examples/").split()[1:])
    told = cluster.server.kubectl(*watch.replace(" --watch", "").split()[1:]).stdout
    assert "smollm2" in told
    assert cluster.find("v1", "ServiceAccount", "kvferry-router", "default") is not None


def test_an_upgrade_changes_what_is_asked_for(cluster: Cluster) -> None:
    """Other values reach the Deployment, the settings and the rights; what was asked for before and is not now goes."""
    cluster.install(RELEASE, ingresses={"enabled": True}, replicas=2)
    before = cluster.deployment()
    assert cluster.find("policy/v1", "PodDisruptionBudget", RELEASE) is not None
    cluster.run("upgrade", RELEASE, logLevel="debug")
    after = cluster.deployment()
    assert before is not None and after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"]["replicas"] == 1
    assert "--log-level=debug" in after["spec"]["template"]["spec"]["containers"][0]["args"]
    marks = [found["spec"]["template"]["metadata"]["annotations"]["checksum/settings"] for found in (before, after)]
    assert marks[0] != marks[1]
    assert cluster.find("policy/v1", "PodDisruptionBudget", RELEASE) is None
    role = cluster.find("rbac.authorization.k8s.io/v1", "Role", RELEASE, "default")
    assert role is not None
    assert "ingresses" not in str(role["rules"])


def test_an_upgrade_without_a_change_changes_nothing(cluster: Cluster) -> None:
    """No object gets a new generation, so that no pod is replaced and no CRD is served anew."""
    cluster.install()
    first = cluster.deployment(), cluster.crd()
    cluster.run("upgrade", RELEASE)
    second = cluster.deployment(), cluster.crd()
    for before, after in zip(first, second, strict=True):
        assert before is not None and after is not None
        assert before["metadata"]["generation"] == after["metadata"]["generation"]


def test_an_upgrade_brings_the_new_crd_to_the_services_that_are_there(cluster: Cluster, tmp_path: Path) -> None:
    """A release whose CRD lacked a field, with a service: after the upgrade the service is there and may use it."""
    cluster.install(chart=edited(tmp_path, lambda spec: spec.pop("transfer")))
    made = cluster.apply_service()
    with pytest.raises(Refused, match=r'"transfer"|transfer: field not declared'):
        cluster.apply_service(spec__transfer={"lease": "20s"})
    cluster.run("upgrade", RELEASE)
    assert "transfer" in fields(cluster.crd())

    def taken() -> bool:
        try:
            return bool(cluster.apply_service(spec__transfer={"lease": "20s"})["spec"]["transfer"]["lease"] == "20s")
        except Refused:  # served by the old schema some moments more
            return False

    wait_for(taken, "the new field to be served")
    found = cluster.service()
    assert found is not None
    assert found["metadata"]["uid"] == made["metadata"]["uid"]


def test_a_rollback_keeps_the_services(cluster: Cluster) -> None:
    """Back at the first revision, the operator is as it was and every service is there."""
    cluster.install(RELEASE, logLevel="warning")
    cluster.run("upgrade", RELEASE, logLevel="debug", replicas=2)
    made = cluster.apply_service(spec__transfer={"lease": "20s"})
    cluster.helm("rollback", RELEASE, "1", f"--namespace={HOME}")
    deployment = cluster.deployment()
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 1
    assert "--log-level=warning" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    found = cluster.service()
    assert found is not None
    assert (found["metadata"]["uid"], found["spec"]) == (made["metadata"]["uid"], made["spec"])


def test_a_rollback_to_older_crds_hides_what_they_do_not_know(cluster: Cluster, tmp_path: Path) -> None:
    """The service stays; its newer field is not shown by the older CRD, and is there again after the next upgrade."""
    cluster.install(chart=edited(tmp_path, lambda spec: spec.pop("transfer")))
    cluster.run("upgrade", RELEASE)
    made = cluster.apply_service(spec__transfer={"lease": "20s"})

    def shown() -> Any:
        found = cluster.service()
        assert found is not None
        return found["spec"].get("transfer")

    wait_for(lambda: shown() == made["spec"]["transfer"], "the field to be served")
    cluster.helm("rollback", RELEASE, "1", f"--namespace={HOME}")
    wait_for(lambda: shown() is None, "the older CRD to be served")
    cluster.run("upgrade", RELEASE)
    wait_for(lambda: shown() == made["spec"]["transfer"], "the newer CRD to be served")


def test_crds_that_the_chart_no_longer_installs_stay(cluster: Cluster) -> None:
    """Handed over to whoever applies them by hand from then on: no service goes with them."""
    cluster.install()
    made = cluster.apply_service()
    cluster.run("upgrade", RELEASE, crds={"install": False})
    assert cluster.crd() is not None
    found = cluster.service()
    assert found is not None
    assert found["metadata"]["uid"] == made["metadata"]["uid"]


def test_crds_by_hand_can_be_upgraded_by_hand(cluster: Cluster, tmp_path: Path) -> None:
    """The command that the chart's README tells, over CRDs that an earlier release applied in another way."""
    older = edited(tmp_path, lambda spec: spec.pop("transfer"))
    cluster.server.kubectl("create", "-f", str(older / "files" / "crds"))
    assert "transfer" not in fields(cluster.crd())
    cluster.server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    assert "transfer" in fields(cluster.crd())


def test_uninstalling_leaves_services_and_nothing_else(cluster: Cluster) -> None:
    """CRDs and services stay as they are, without a finalizer that nobody answers; all else of the release goes. The
    same release can be installed again and finds its services."""
    cluster.install(RELEASE, replicas=2)
    made = cluster.apply_service()
    told = cluster.uninstall()
    assert "customresourcedefinition" in told.lower().replace(" ", ""), "Helm says what it keeps"
    found = cluster.service()
    assert found is not None
    assert found["metadata"]["uid"] == made["metadata"]["uid"]
    assert not found["metadata"].get("finalizers")
    for version, kinds in {
        "apps/v1": ["Deployment"],
        "policy/v1": ["PodDisruptionBudget"],
        "networking.k8s.io/v1": ["NetworkPolicy"],
        "rbac.authorization.k8s.io/v1": ["Role", "RoleBinding"],
    }.items():
        for kind in kinds:
            assert cluster.server.client.list(version, kind, HOME) == []
    assert cluster.find("rbac.authorization.k8s.io/v1", "Role", RELEASE, "default") is None
    assert cluster.find("v1", "ServiceAccount", "kvferry-router", "default") is None
    cluster.install()
    found = cluster.service()
    assert found is not None
    assert found["metadata"]["uid"] == made["metadata"]["uid"]


def test_crds_of_somebody_else_are_not_taken_by_surprise(cluster: Cluster) -> None:
    """CRDs that were applied by hand: Helm says whose they are. `--take-ownership` adopts them, `crds.install=false`
    leaves them to whoever applied them."""
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        cluster.server.client.create(yaml.safe_load(path.read_text()))
    made = cluster.apply_service()
    with pytest.raises(HelmError, match=r"invalid ownership metadata|cannot be imported into the current release"):
        cluster.install()
    cluster.install("other", crds={"install": False})
    crd = cluster.crd()
    assert crd is not None
    assert "meta.helm.sh/release-name" not in crd["metadata"].get("annotations", {})
    cluster.uninstall("other")
    cluster.install(RELEASE, "--take-ownership")
    crd = cluster.crd()
    assert crd is not None
    assert crd["metadata"]["annotations"]["meta.helm.sh/release-name"] == RELEASE
    found = cluster.service()
    assert found is not None
    assert found["metadata"]["uid"] == made["metadata"]["uid"]


def test_two_releases_do_not_serve_one_namespace(cluster: Cluster) -> None:
    """The second is refused, since both would write the same objects; one for another namespace is welcome."""
    cluster.install()
    with pytest.raises(HelmError, match="kvferry-router"):
        cluster.install("other", crds={"install": False})
    cluster.uninstall("other", "--ignore-not-found")
    elsewhere = cluster.server.namespace()
    cluster.install("other", crds={"install": False}, watchNamespaces=[elsewhere])
    assert cluster.deployment("other-kvferry") is not None


def test_a_namespace_that_is_not_there_is_named(cluster: Cluster) -> None:
    """Namespaces to be watched must exist: the error says which does not."""
    with pytest.raises(HelmError, match=re.escape('namespaces "nowhere" not found')):
        cluster.install(watchNamespaces=["nowhere"])


def test_every_profile_is_accepted(cluster: Cluster) -> None:
    """The server takes each object of each profile as it is, strictly."""
    for name in ("team-a", "team-b"):
        if cluster.find("v1", "Namespace", name, "") is None:
            cluster.server.namespace(name)
    if cluster.find("v1", "Namespace", HOME, "") is None:
        cluster.server.namespace(HOME)
    for values in PROFILES.values():
        for wanted in cluster.helm.template(values, namespace=HOME):
            cluster.server.client.apply(wanted, dryRun="All", fieldValidation="Strict")
