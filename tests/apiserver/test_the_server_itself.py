"""The fixture: what the tests of this folder stand on."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.api_server import ApiServer
from tests.support.cluster_tools import Absent, find_tools
from tests.support.kube_client import Refused
from tests.support.waiting import wait_for


def test_objects_outlive_an_outage(api_server: ApiServer, namespace: str) -> None:
    """`stop` refuses connections at once; after `start` the same address, users and objects are there."""
    service_account = api_server.kubeconfig_for(namespace, "default")
    api_server.stop()
    try:
        with pytest.raises(OSError):
            api_server.client.request("GET", "/readyz")
    finally:
        api_server.start()
    found = api_server.client.get(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt", "namespace": namespace}}
    )
    assert "BEGIN CERTIFICATE" in found["data"]["ca.crt"]
    told = api_server.kubectl("auth", "whoami", "-o", "name", kubeconfig=service_account, check=False)
    assert told.returncode == 0, told.stderr


def test_users_have_their_own_rights(api_server: ApiServer, namespace: str) -> None:
    """The admin may everything; a ServiceAccount nothing that nobody gave it."""
    client = api_server.client_of(api_server.token_for(namespace, "default"))
    assert api_server.client.list("v1", "ConfigMap", namespace)
    with pytest.raises(Refused, match="configmaps is forbidden") as caught:
        client.list("v1", "ConfigMap", namespace)
    assert caught.value.code == 403


def test_pod_security_and_accounts_are_enforced(api_server: ApiServer) -> None:
    """Admission is as in a cluster: a pod that is not restricted, or whose account is missing, is refused."""
    namespace = api_server.namespace(labels={"pod-security.kubernetes.io/enforce": "restricted"})
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": namespace},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    with pytest.raises(Refused, match='violates PodSecurity "restricted'):
        api_server.client.create(pod)
    pod["spec"]["serviceAccountName"] = "nobody"  # type: ignore[index]
    with pytest.raises(Refused, match='serviceaccount "nobody" not found'):
        api_server.client.create(pod)


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A test process that is killed leaves neither process behind."""
    try:
        tools = find_tools("apiserver")
    except Absent as absent:
        pytest.skip(str(absent))
    script = (
        "import sys, time; from pathlib import Path; from tests.support.api_server import ApiServer\n"
        "server = ApiServer(*map(Path, sys.argv[1:])); server.start()\n"
        "print(server._etcd.pid, server._server.pid, flush=True); time.sleep(300)\n"
    )
    command = [sys.executable, "-c", script, str(tools), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        etcd, server = process.stdout.readline().split()
        process.kill()
    pids = [int(etcd), int(server)]
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), f"{pids} to end")
