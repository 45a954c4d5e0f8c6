"""A branch of the hub becomes one commit for all pods of a service, and no pod is started anew for it."""

from typing import Any

import pytest

from kvferry_operator.api.source import parse_source
from kvferry_operator.plan.causes import REASONS
from kvferry_operator.plan.manifests.commits import commit_names
from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.plan.manifests.model import FETCH
from kvferry_wire.fetch import COMMIT_VARIABLE, FETCH_EXITS, FetchReport, encode_report
from tests.operator.cluster import make_found, make_objects, pod_of
from tests.operator.fake_cluster import FakeCluster

FIRST, SECOND = "1" * 40, "2" * 40
MODEL = {"name": "m", "source": "hf://org/m@main", "size": "1Gi"}
TWO = {"spec__decode__replicas": 2}


def make_cluster(source: str = MODEL["source"]) -> FakeCluster:
    """A service whose pods are there and have not fetched."""
    cluster = FakeCluster(make_found(spec__model={**MODEL, "source": source}, **TWO))
    cluster.settle()
    cluster.log.clear()
    cluster.deleted_pods.clear()
    return cluster


def fetched(pod: Object, commit: str, at: str, source: str = MODEL["source"]) -> None:
    """Let a pod's init container have ended well."""
    message = encode_report(FetchReport(source=source, commit=commit, bytes=5)).decode()
    ended = {"exitCode": 0, "message": message, "finishedAt": at}
    pod["status"]["initContainerStatuses"] = [{"name": FETCH, "state": {"terminated": ended}}]


def kept(cluster: FakeCluster) -> dict[str, str]:
    """The commits in the plan's ConfigMap."""
    data = cluster.objects["ConfigMap", "demo-plan"]["data"]
    return {key: value for key, value in data.items() if key.startswith("commit-")}


def edit(cluster: FakeCluster, source: str) -> None:
    found = make_found(spec__model={**MODEL, "source": source}, **TWO)
    found["metadata"]["generation"] = cluster.found["metadata"]["generation"] + 1
    found["status"] = cluster.found["status"]
    cluster.found = found


def test_the_first_report_is_kept_and_starts_no_pod_anew() -> None:
    """The one that had fetched first, whatever the others got; status and ConfigMap tell it, templates stay."""
    cluster = make_cluster()
    assert "modelCommit" not in cluster.found["status"]
    pods = [pod for pod in cluster.pods.values() if "router" not in pod["metadata"]["name"]]
    fetched(pods[1], SECOND, "2026-01-01T00:00:09Z")
    fetched(pods[0], FIRST, "2026-01-01T00:00:02Z")
    cluster.settle()
    assert cluster.found["status"]["modelCommit"] == FIRST
    assert list(kept(cluster).values()) == [FIRST]
    assert not cluster.deleted_pods
    assert {effect.object["kind"] for effect in cluster.log} == {"ConfigMap"}  # type: ignore[union-attr]


def test_a_commit_stays_when_the_pods_that_told_it_go() -> None:
    """Nothing is remembered in the operator: the ConfigMap is read back."""
    cluster = make_cluster()
    fetched(next(iter(cluster.pods.values())), FIRST, "2026-01-01T00:00:02Z")
    cluster.settle()
    for pod in cluster.pods.values():
        fetched(pod, SECOND, "2026-01-01T00:00:00Z")
    cluster.settle()
    assert cluster.found["status"]["modelCommit"] == FIRST


def test_pods_find_the_commit_by_an_optional_reference() -> None:
    """It is part of the template from the beginning, under a key of the source alone."""
    names = commit_names("demo", parse_source(MODEL["source"]))
    assert names is not None
    spec = pod_of(make_objects(spec__model=MODEL), "decode")
    (reference,) = [one for one in spec["initContainers"][0]["env"] if one["name"] == COMMIT_VARIABLE]
    assert reference["valueFrom"] == {"configMapKeyRef": {"name": "demo-plan", "key": names.key, "optional": True}}
    other = commit_names("demo", parse_source("hf://org/m@v2"))
    assert other is not None and other.key != names.key


def test_another_source_begins_anew_while_the_old_still_runs() -> None:
    """The old revision's pods keep their commit for as long as their Deployments are there; then it goes."""
    cluster = make_cluster()
    fetched(next(iter(cluster.pods.values())), FIRST, "2026-01-01T00:00:02Z")
    cluster.settle()
    ready = cluster.ready
    new = "hf://org/m@next"
    key = commit_names("demo", parse_source(new))
    assert key is not None
    cluster.ready = lambda pod: ready(pod) and not _is_new(cluster, pod)
    edit(cluster, new)
    cluster.settle()
    assert list(kept(cluster).values()) == [FIRST]
    assert "modelCommit" not in cluster.found["status"]
    cluster.ready = ready
    for pod in cluster.pods.values():
        fetched(pod, SECOND, "2026-01-01T00:01:00Z", new)
    cluster.settle()
    assert kept(cluster) == {key.key: SECOND}
    assert cluster.found["status"]["modelCommit"] == SECOND


def _is_new(cluster: FakeCluster, pod: Object) -> bool:
    revision = cluster.found["status"].get("revision")
    return pod["metadata"]["labels"].get("serving.kvferry.dev/revision") == revision


@pytest.mark.parametrize(
    ("source", "commit"),
    [(f"hf://org/m@{FIRST}", FIRST), ("toy", None), ("https://h/m/", None), ("demo:smollm2", None)],
)
def test_sources_that_name_their_content_need_no_reference(source: str, commit: str | None) -> None:
    """A commit in the manifest is the commit; other sources have none."""
    cluster = make_cluster(source)
    assert cluster.found["status"].get("modelCommit") == commit
    assert COMMIT_VARIABLE not in str(make_objects(spec__model={**MODEL, "source": source}))


@pytest.mark.parametrize(
    "state",
    [
        {"exitCode": 0, "message": "no report"},
        {"exitCode": 1, "message": encode_report(FetchReport(source=MODEL["source"], commit=FIRST)).decode()},
        {"exitCode": 0, "message": encode_report(FetchReport(source="hf://org/other", commit=FIRST)).decode()},
        {"exitCode": 0, "message": encode_report(FetchReport(source=MODEL["source"], commit="main")).decode()},
        {"exitCode": 0},
    ],
)
def test_what_is_no_report_of_this_source_is_not_believed(state: dict[str, Any]) -> None:
    """Another source's pods, a failed fetch, or a container's last words."""
    cluster = make_cluster()
    for pod in cluster.pods.values():
        pod["status"]["initContainerStatuses"] = [{"name": FETCH, "state": {"terminated": state}}]
    cluster.settle()
    assert not kept(cluster)
    assert "modelCommit" not in cluster.found["status"]


def test_every_way_a_fetch_ends_is_a_reason_of_the_status() -> None:
    """The container's table and the operator's are one."""
    assert {str(reason) for reason in FETCH_EXITS} <= set(REASONS)
