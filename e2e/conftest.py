"""A cluster, kvferry installed by its chart, and namespaces that enforce the Pod Security Standard "restricted"."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness.kubectl import Kubectl, KubectlError, Object
from e2e.harness.nodes import Nodes, own_nodes
from e2e.harness.service import READY_AGAIN_S, Service
from e2e.harness.waiting import wait_for

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "kvferry"
VALUES = Path(os.environ.get("E2E_VALUES", ROOT / "e2e" / "values-kind.yaml"))
SYSTEM = "kvferry-e2e-system"
WATCHED = ("kvferry-e2e", "kvferry-e2e-quota")
HOW = 'make e2e makes one for the run; or: make cluster-up, eval "$(make -s cluster-env)"; or set KUBECONFIG'
CRDS = "app.kubernetes.io/part-of=kvferry"
INSTALL_S = 180.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: needs minutes, or harms the cluster's nodes; `make e2e-full` runs it")
    config.addinivalue_line("markers", "restarts_operator: what the test does may end the operator's process")


def restricted(name: str) -> Object:
    """A namespace that admits restricted pods only."""
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def helm(*words: str) -> str:
    """Run Helm. Raises ``AssertionError`` with what it said."""
    command = [os.environ.get("E2E_HELM", "helm"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S + 30, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


@pytest.fixture(scope="session")
def cluster() -> Kubectl:
    """The cluster of the environment, in no namespace of interest."""
    kubectl = Kubectl()
    try:
        kubectl.run("get", "namespaces", timeout_s=30)
    except (KubectlError, FileNotFoundError) as error:
        pytest.skip(f"no cluster: {error}. {HOW}")
    return kubectl


@pytest.fixture(scope="session")
def release(cluster: Kubectl) -> Iterator[str]:
    """kvferry, installed as a user would: the operator runs under the chart's ServiceAccount. Yields its namespace."""
    releases = json.loads(helm("list", "--all-namespaces", "--output=json"))
    others = [each for each in releases if _is_other(each)]
    if others:
        where = others[0]["namespace"]
        pytest.exit(f"kvferry is installed here already: helm uninstall {others[0]['name']} -n {where}", returncode=1)
    if any("pending" in each["status"] for each in releases if each["namespace"] == SYSTEM):
        # It locks the release, and is of a run that was ended while it installed.
        helm("uninstall", "kvferry", "--namespace", SYSTEM)
    made_crds = not cluster.list("crd", CRDS)
    cluster.apply(*(restricted(name) for name in (SYSTEM, *WATCHED)))
    chosen = ["--namespace", SYSTEM, "--values", str(VALUES), "--set", f"watchNamespaces={{{','.join(WATCHED)}}}"]
    # Images may have been loaded anew under the same tag: pods of another run are of another template.
    chosen += ["--set", "settings.modelStorePorts={443,8000}", "--set-string", f"podAnnotations.e2e-run={time.time()}"]
    # CRDs outlive their release; those that one has left behind are taken over.
    chosen += ["--take-ownership", "--wait", f"--timeout={INSTALL_S:g}s"]
    try:
        helm("upgrade", "--install", "kvferry", str(CHART), *chosen)
    except AssertionError as error:
        shown = Kubectl(SYSTEM).run("get", "pods,events")
        pytest.exit(f"kvferry could not be installed with {VALUES}: {error}\n{shown}", returncode=1)
    try:
        yield SYSTEM
    finally:
        if not os.environ.get("E2E_KEEP"):
            for name in WATCHED:
                Kubectl(name).run("delete", "infsvc", "--all", "--wait=true", timeout_s=120)
            helm("uninstall", "kvferry", "--namespace", SYSTEM, "--wait", f"--timeout={INSTALL_S:g}s")
            for name in (*WATCHED, SYSTEM):
                cluster.delete("namespace", name, "--wait=true")
            if made_crds:
                cluster.run("delete", "crd", f"--selector={CRDS}")


def _is_other(found: Object) -> bool:
    chart: str = found["chart"]
    return chart.startswith("kvferry-") and found["namespace"] != SYSTEM


@pytest.fixture(scope="session")
def kubectl(release: str) -> Kubectl:
    """kubectl in a namespace that the operator watches."""
    return Kubectl(WATCHED[0])


@pytest.fixture(scope="session")
def nodes(cluster: Kubectl) -> Nodes:
    """The cluster's nodes, where they are containers of this machine's Docker."""
    found = own_nodes()
    if found is None:
        pytest.skip('the nodes of this cluster are not ours to break: make cluster-up, eval "$(make -s cluster-env)"')
    return found


@pytest.fixture(scope="session")
def hostnames(cluster: Kubectl) -> list[str]:
    """Names of the nodes that take pods."""
    listed = cluster.list("nodes")
    return [node["metadata"]["name"] for node in listed if not node["spec"].get("taints")]


@pytest.fixture
def service(shared: Service) -> Service:
    """The service that a file's tests share, ready again however the test before left it."""
    shared.wait_ready(READY_AGAIN_S)
    return shared


@pytest.fixture(autouse=True)
def operator_stays_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may make the operator crash unnoticed: its restarts are the same before and after."""
    if "release" not in request.fixturenames or request.node.get_closest_marker("restarts_operator"):
        yield
        return
    system = Kubectl(request.getfixturevalue("release"))
    before = _restarts(system)
    yield
    after = wait_for(lambda: _restarts(system), "the operator's pods to be listed", 30)
    assert after == before, f"the operator was started again: {before} before, {after} after"


def _restarts(system: Kubectl) -> dict[str, int]:
    pods = system.list("pods", "app.kubernetes.io/instance=kvferry")
    return {
        pod["metadata"]["name"]: sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ()))
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp")
    }
