"""Which commit of the hub a service runs: what its first pods got is what later ones get.

A branch or tag is resolved by the container that fetches, since the operator itself never reaches the hub. The first
pod that has fetched tells the commit in its termination message; the operator keeps it in the ConfigMap of the plan,
under a key of the source, and shows it in the status. A container that fetches later finds it there, by an optional
reference that is part of the pods' template from the beginning: that a commit becomes known changes no template and
starts no pod anew. Pods that start before it is known resolve the branch each for itself, within seconds; should one of
them get another commit, its compat hash differs, no KV is ferried to or from it, and the status says so
(``plan.pairing``).
"""

import hashlib
import re
from collections.abc import Iterable, Mapping

from kvferry_operator.api.source import ModelSource
from kvferry_operator.plan.manifests.meta import Object, Owner
from kvferry_operator.plan.manifests.model import FETCH, CommitNames
from kvferry_operator.plan.manifests.names import child
from kvferry_operator.plan.observed import Seen, owner_uid
from kvferry_wire.fetch import COMMIT_VARIABLE, FetchReport, decode_report

PLAN = "plan"  # the ConfigMap's suffix
PREFIX = "commit-"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_names(service: str, source: ModelSource) -> CommitNames | None:
    """Where the commit of a source is kept; ``None`` for a source that has none, or names it itself."""
    if source.kind != "hub" or pinned(source) is not None:
        return None
    mark = hashlib.blake2s(str(source).encode(), digest_size=8).hexdigest()
    return CommitNames(config_map=child(service, PLAN), key=f"{PREFIX}{mark}")


def pinned(source: ModelSource) -> str | None:
    """The commit that a source names itself."""
    named = source.kind == "hub" and source.revision is not None and _COMMIT.fullmatch(source.revision)
    return source.revision if named else None


def commits(owner: Owner, source: ModelSource, seen: Seen) -> dict[str, str]:
    """The commits to keep, by key: those that a Deployment of the service refers to, and the source's own if known."""
    plan = seen.child("ConfigMap", child(owner.name, PLAN))
    before: Mapping[str, str] = {} if plan is None or owner_uid(plan) != owner.uid else plan.get("data", {})
    kept = {key: value for key, value in before.items() if key.startswith(PREFIX) and _COMMIT.fullmatch(value)}
    deployments = [found for found in seen.of_kind("Deployment") if owner_uid(found) == owner.uid]
    used = {key for deployment in deployments for key in _references(deployment)}
    found = {key: value for key, value in kept.items() if key in used}
    names = commit_names(owner.name, source)
    if names is None:
        return found
    if names.key in kept:
        return {**found, names.key: kept[names.key]}
    reported = sorted(told for pod in seen.pods if (told := _reported(pod, source)) is not None)
    return {**found, names.key: reported[0][1]} if reported else found


def fetched(pod: Object, source: ModelSource) -> FetchReport | None:
    """What a pod reports of the source that it has fetched; ``None`` where it does not tell."""
    told = _told(pod, source)
    return None if told is None else told[1]


def _references(deployment: Object) -> Iterable[str]:
    containers = deployment.get("spec", {}).get("template", {}).get("spec", {}).get("initContainers", ())
    for container in containers:
        for variable in container.get("env", ()):
            if variable.get("name") == COMMIT_VARIABLE:
                yield variable.get("valueFrom", {}).get("configMapKeyRef", {}).get("key", "")


def _reported(pod: Object, source: ModelSource) -> tuple[str, str] | None:
    """When a pod had fetched, and the commit that it got."""
    told = _told(pod, source)
    return None if told is None or told[1].commit is None else (told[0], told[1].commit)


def _told(pod: Object, source: ModelSource) -> tuple[str, FetchReport] | None:
    """When a pod had fetched, and its report."""
    for state in pod.get("status", {}).get("initContainerStatuses", ()):
        ended = state.get("state", {}).get("terminated", {})
        if state.get("name") != FETCH or ended.get("exitCode") != 0:
            continue
        report = decode_report(str(ended.get("message", "")))
        if report is None or report.source != str(source) or (report.commit and not _COMMIT.fullmatch(report.commit)):
            continue
        return str(ended.get("finishedAt", "")), report
    return None
