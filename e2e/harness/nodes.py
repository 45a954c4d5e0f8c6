"""The nodes of a kind cluster: what happens to machines, not to objects."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.harness.asking import ANSWER_S, Answer, read_events, request_body
from e2e.harness.kubectl import Object
from e2e.harness.waiting import wait_for

API_MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"
ASIDE = "/etc/kubernetes/kube-apiserver.yaml"
API_GONE_S = 60.0
API_BACK_S = 120.0


class Nodes:
    """Nodes that are containers of this machine's Docker."""

    def __init__(self, cluster: str) -> None:
        self.control = f"{cluster}-control-plane"

    def run(self, node: str, *command: str, timeout_s: float = 60.0) -> str:
        """Run a command in a node; returns its standard output. Raises ``AssertionError`` where it fails."""
        whole = ["docker", "exec", node, *command]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{' '.join(whole)}: {done.stderr.strip()}"
        return done.stdout

    def succeeds(self, node: str, *command: str, timeout_s: float = 60.0) -> bool:
        """Whether a command in a node succeeds."""
        whole = ["docker", "exec", node, *command]
        return subprocess.run(whole, capture_output=True, timeout=timeout_s, check=False).returncode == 0

    def ask(self, url: str, prompt: str, *, max_tokens: int = 12) -> Answer:
        """Ask from a node, which needs no API server on the way.

        Args:
            url: of the endpoint, with an address: nodes do not use the cluster's DNS.
        """
        answer = Answer(prompt)
        curl = ["curl", "--silent", "--show-error", "--no-buffer", "--include", "--max-time", f"{ANSWER_S:g}"]
        headers = ["--header", "content-type: application/json", "--data", request_body(prompt, max_tokens)]
        whole = ["docker", "exec", self.control, *curl, *headers, f"{url}/chat/completions"]
        done = subprocess.run(whole, capture_output=True, timeout=ANSWER_S + 30, check=False)
        if done.returncode:
            answer.cut = done.stderr.decode("utf-8", "replace").strip()
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        answer.status = int(status.split()[1]) if status else 0
        answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if answer.status == 200:
            read_events(iter(body.splitlines()), answer)
        else:
            answer.error = body.decode("utf-8", "replace")
        return answer

    def kill_container(self, pod: Object, container: str) -> None:
        """SIGKILL the first process of a pod's container, which nothing inside can send it."""
        (state,) = [each for each in pod["status"]["containerStatuses"] if each["name"] == container]
        node, identity = pod["spec"]["nodeName"], state["containerID"].partition("://")[2]
        pid = self.run(node, "crictl", "inspect", "--output=go-template", "--template={{.info.pid}}", identity)
        self.run(node, "kill", "-KILL", pid.strip())

    def restart_kubelet(self, node: str) -> None:
        self.run(node, "systemctl", "restart", "kubelet")

    @contextmanager
    def api_server_away(self) -> Iterator[None]:
        """No API server while the body of the ``with`` runs."""
        self.run(self.control, "mv", API_MANIFEST, ASIDE)
        try:
            wait_for(lambda: not self._api_answers(), "the API server to stop", API_GONE_S)
            yield
        finally:
            self.run(self.control, "mv", ASIDE, API_MANIFEST)
            wait_for(self._api_answers, "the API server to come back", API_BACK_S)

    def _api_answers(self) -> bool:
        return self.succeeds(
            self.control,
            *("kubectl", "--kubeconfig=/etc/kubernetes/admin.conf", "--request-timeout=5s", "get", "--raw=/readyz"),
        )


def own_nodes() -> Nodes | None:
    """The nodes of the cluster that ``cluster.sh`` made; ``None`` for a cluster from elsewhere."""
    cluster = os.environ.get("CLUSTER", "")
    if not cluster or os.environ.get("KUBECONFIG", "").rpartition("/")[0].rpartition("/")[2] != cluster:
        return None
    nodes = Nodes(cluster)
    return nodes if nodes.succeeds(nodes.control, "true") else None
