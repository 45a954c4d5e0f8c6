"""What is wrong with a service stands in its status within 30 s, with the reason that docs/kubernetes.md lists."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.conftest import restricted
from e2e.harness.kubectl import Kubectl, Object
from e2e.harness.nodes import own_nodes
from e2e.harness.service import Service, service
from e2e.harness.waiting import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

HUB_NAMESPACE = "kvferry-e2e-hub"  # as in the image whose HF_ENDPOINT leads here
HUB_IMAGE = "kvferry/runtime:e2e-hub"
# A hub that has no model: what it says of unknown and of gated ones is what the real one says.
HUB = """
import http.server
class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "Access is restricted" if gated else "Repository not found")
        self.send_header("Content-Length", "0")
        self.end_headers()
    do_HEAD = do_GET
http.server.ThreadingHTTPServer(("", 8000), Hub).serve_forever()
"""


@pytest.fixture(scope="module")
def hub(cluster: Kubectl) -> Iterator[None]:
    """A model hub in the cluster, for pods of the image that looks there."""
    if own_nodes() is None:
        pytest.skip(f"{HUB_IMAGE} is loaded by make cluster-up alone: no other image looks for models at a hub of ours")
    inside = Kubectl(HUB_NAMESPACE)
    cluster.apply(restricted(HUB_NAMESPACE))
    inside.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub"},
            "spec": {"selector": {"app": "hub"}, "ports": [{"port": 8000}]},
        },
        _hub_pod(),
    )
    inside.run("wait", "--for=condition=Ready", "pod/hub", "--timeout=60s", timeout_s=70)
    yield
    cluster.delete("namespace", HUB_NAMESPACE, "--wait=true")


def _hub_pod() -> Object:
    container = {
        "name": "hub",
        "image": HUB_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-P", "-c", HUB],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hub", "labels": {"app": "hub"}}, "spec": spec}


@pytest.mark.parametrize(
    ("condition", "reason", "words", "changes"),
    [
        ("DecodeReady", "ImageMissing", "no-such-image", {"decode": {"image": "localhost/no-such-image:1"}}),
        ("DecodeReady", "NoRoom", "memory", {"decode": {"resources": {"requests": {"memory": "900Gi"}}}}),
        ("PrefillReady", "NoRoom", "node", {"prefill": {"nodeSelector": {"kvferry.dev/no-such-label": "true"}}}),
        (
            "DecodeReady",
            "OutOfMemory",
            "memory",
            {"decode": {"resources": {"requests": {"memory": "64Mi"}, "limits": {"memory": "64Mi"}}}},
        ),
        (
            "DecodeReady",
            "ModelMissing",
            "no-such/model",
            {"model": {"source": "no-such/model"}, "decode": {"image": HUB_IMAGE}, "prefill": {"image": HUB_IMAGE}},
        ),
        (
            "DecodeReady",
            "ModelAccessDenied",
            "gated/model",
            {"model": {"source": "gated/model"}, "decode": {"image": HUB_IMAGE}, "prefill": {"image": HUB_IMAGE}},
        ),
        ("DecodeReady", "VolumesPending", "no-such-claim", {"model": {"source": "pvc://no-such-claim"}}),
        ("DecodeReady", "CrashLoop", "exit status 1", {"decode": {"env": [{"name": "PYTHONHASHSEED", "value": "no"}]}}),
    ],
)
def test_a_fault_is_told(
    kubectl: Kubectl,
    request: pytest.FixtureRequest,
    condition: str,
    reason: str,
    words: str,
    changes: dict[str, Any],
) -> None:
    """Role and Ready conditions name the reason, and the message holds what a person must know."""
    if HUB_IMAGE in str(changes):
        request.getfixturevalue("hub")
    with service(kubectl, "faulty", **changes) as made:
        told = made.wait_reason(condition, reason)
        assert words in told["message"]
        ready = made.wait_reason("Ready", reason)
        assert ready["status"] == "False"


def test_a_quota_in_the_way_is_told_and_its_end_is_noticed(cluster: Kubectl, release: str) -> None:
    """A ResourceQuota refuses the pods; once it is gone they come without anyone touching the service."""
    full = Kubectl("kvferry-e2e-quota")
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "tight"},
        "spec": {"hard": {"pods": "1"}},
    }
    full.apply(quota)
    wait_for(
        lambda: "pods" in json.dumps((full.get("quota", "tight") or {}).get("status", {})), "the quota to hold", 30
    )
    with service(full, "squeezed") as made:
        told = made.wait_reason("Ready", "QuotaExceeded")
        assert "tight" in told["message"]
        full.delete("quota", "tight")
        made.wait_ready(300)


def test_a_fault_that_is_mended_goes(kubectl: Kubectl) -> None:
    """A bad image, then the right one: the service becomes ready and the status says so."""
    with service(kubectl, "mended", decode={"image": "localhost/no-such-image:1"}) as made:
        made.wait_reason("DecodeReady", "ImageMissing")
        made.apply(decode={"image": None})
        made.wait_ready()


def test_a_wrong_manifest_is_refused_by_the_api_server(kubectl: Kubectl, release: str) -> None:
    """The field and what is accepted, before anything is made."""
    made = Service(kubectl, "wrong")
    with pytest.raises(Exception, match=r"spec\.decode\.replicas"):
        made.apply(decode={"replicas": -1})
