"""Pods of one revision that run different models ferry nothing to each other, and the status says which and why."""

from typing import Any

import pytest

from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.plan.manifests.model import FETCH
from kvferry_wire.fetch import FetchReport, encode_report
from tests.operator.cluster import make_found
from tests.operator.fake_cluster import FakeCluster

HUB, WEB = "hf://org/m@main", "https://store.example.com/m/"
OLD, NEW = "a" * 64, "b" * 64
OLD_COMMIT, NEW_COMMIT = "1" * 40, "2" * 40
Told = dict[str, Any]


class Pods:
    """Two pods of each role, by role and number, and what the status says of KV between them."""

    def __init__(self, source: str) -> None:
        self.source = source
        model = {"name": "m", "source": source, "size": "1Gi"}
        found = make_found(spec__model=model, spec__prefill={"replicas": 2}, spec__decode__replicas=2)
        self.cluster = FakeCluster(found)
        self.cluster.settle()
        self.cluster.log.clear()

    def of(self, role: str) -> list[Object]:
        marks = "app.kubernetes.io/component"
        return [pod for _, pod in sorted(self.cluster.pods.items()) if pod["metadata"]["labels"][marks] == role]

    def fetched(self, pod: Object, **report: Any) -> None:
        """Let a pod's init container have ended well with this report."""
        message = encode_report(FetchReport(source=self.source, **report)).decode()
        ended = {"exitCode": 0, "message": message, "finishedAt": "2026-01-01T00:00:02Z"}
        pod["status"]["initContainerStatuses"] = [{"name": FETCH, "state": {"terminated": ended}}]

    def all_fetched(self, prefill: Told, decode: Told) -> None:
        for role, report in (("prefill", prefill), ("decode", decode)):
            for pod in self.of(role):
                self.fetched(pod, **report)

    def ferry(self) -> tuple[str, str, str]:
        self.cluster.settle()
        (one,) = [one for one in self.cluster.found["status"]["conditions"] if one["type"] == "KVTransferEffective"]
        return one["status"], one["reason"], one["message"]


@pytest.mark.parametrize(
    ("source", "old", "new", "words"),
    [
        (WEB, {"digest": OLD}, {"digest": NEW}, ("contents of https://store.example.com/m/", OLD[:12], NEW[:12])),
        (
            HUB,
            {"digest": OLD, "commit": OLD_COMMIT},
            {"digest": NEW, "commit": NEW_COMMIT},
            ("commits of hf://org/m@main", OLD_COMMIT[:12], NEW_COMMIT[:12]),
        ),
        (HUB, {"commit": OLD_COMMIT}, {"commit": NEW_COMMIT}, (OLD_COMMIT[:12], NEW_COMMIT[:12])),
    ],
    ids=["a folder of the web", "a branch", "images that tell no digest"],
)
def test_roles_with_nothing_in_common_ferry_nothing(source: str, old: Told, new: Told, words: tuple[str, ...]) -> None:
    """Both models are named, and what to do; Ready stays, since decode pods answer by themselves."""
    pods = Pods(source)
    pods.all_fetched(old, old)
    assert pods.ferry()[:2] == ("True", "SameRevision")
    pods.all_fetched(old, new)
    status, reason, message = pods.ferry()
    assert (status, reason) == ("False", "CompatDiffers")
    assert all(word in message for word in (*words, "compat hashes differ", "delete the pods of the older one"))
    (ready,) = [one for one in pods.cluster.found["status"]["conditions"] if one["type"] == "Ready"]
    assert ready["status"] == "True"


def test_one_pod_without_a_partner_is_named() -> None:
    """The others ferry on; with its end the condition is as before."""
    pods = Pods(WEB)
    pods.all_fetched({"digest": OLD}, {"digest": OLD})
    odd = pods.of("decode")[1]
    pods.fetched(odd, digest=NEW)
    status, reason, message = pods.ferry()
    assert (status, reason) == ("True", "SomeDiffer")
    assert f"no prefill pod has what {odd['metadata']['name']} fetched" in message
    assert NEW[:12] in message and pods.of("decode")[0]["metadata"]["name"] not in message
    pods.fetched(odd, digest=OLD)
    assert pods.ferry()[1] == "SameRevision"


def test_two_models_that_each_have_a_pair_are_no_fault() -> None:
    """KV crosses within each."""
    pods = Pods(WEB)
    for role in ("prefill", "decode"):
        for pod, digest in zip(pods.of(role), (OLD, NEW), strict=True):
            pods.fetched(pod, digest=digest)
    assert pods.ferry()[1] == "SameRevision"


def test_commits_of_one_content_pair() -> None:
    """The digest decides: a commit that changes no file of the model makes no other compat hash."""
    pods = Pods(HUB)
    pods.all_fetched({"digest": OLD, "commit": OLD_COMMIT}, {"digest": OLD, "commit": NEW_COMMIT})
    assert pods.ferry()[1] == "SameRevision"


@pytest.mark.parametrize("silent", ["prefill", "decode"])
def test_a_pod_that_tells_nothing_is_no_reason(silent: str) -> None:
    """It may run the same model as any other: an older image's silence is no difference."""
    pods = Pods(WEB)
    pods.all_fetched({"digest": OLD}, {"digest": NEW})
    known, unknown = pods.of(silent)
    unknown["status"]["initContainerStatuses"] = []
    status, reason, message = pods.ferry()
    assert (status, reason) == ("True", "SomeDiffer")
    assert known["metadata"]["name"] in message and unknown["metadata"]["name"] not in message
    known["status"]["initContainerStatuses"] = []
    assert pods.ferry()[1] == "SameRevision"


def test_of_many_pods_some_are_named() -> None:
    """A message has room for few names; how many more there are is said."""
    model = {"name": "m", "source": WEB, "size": "1Gi"}
    pods = Pods(WEB)
    pods.cluster = FakeCluster(make_found(spec__model=model, spec__decode__replicas=6))
    pods.cluster.settle()
    pods.all_fetched({"digest": OLD}, {"digest": OLD})
    for pod in pods.of("decode")[1:]:
        pods.fetched(pod, digest=NEW)
    status, reason, message = pods.ferry()
    assert (status, reason) == ("True", "SomeDiffer")
    assert "and 2 more" in message and len(message) < 1000
