"""Random manifests: the API server and `kvferry up` accept the same ones, and read the same from them."""

import copy
import json
import os
import re
import time
from typing import Any

import pytest
import yaml

from kvferry_operator.api import ManifestError, load_manifest
from kvferry_operator.api.cluster import load_object
from kvferry_operator.api.service import InferenceService
from kvferry_operator.plan import Observed, PlanError, plan
from kvferry_operator.plan.manifests.context import Context
from kvferry_operator.plan.manifests.objects import check_cluster
from tests.operator.cluster import SETTINGS, make_owner
from tests.operator.manifest_fuzz import PLACES, Fuzz, put
from tests.operator.manifests import make_manifest
from tests.support.api_server import ApiServer
from tests.support.kube_client import Object, Refused

MANIFESTS = int(os.environ.get("KVFERRY_FUZZ_MANIFESTS", "600"))
BATCH = 100
MEGABYTES = ("x" * 2**20, "\u00e9" * 2**19, "\U0001f389" * 2**18, "a\nb " * 2**18)
UNKNOWN = re.compile(r'unknown field "([^"]*)"')


def loaded(manifest: Object) -> InferenceService | set[str]:
    """What the loader reads, or the fields that it blames."""
    try:
        service = load_manifest(yaml.safe_dump(manifest, allow_unicode=True), "f.yaml")
    except ManifestError as error:
        return {plain(fault.field) for fault in error.faults}
    try:
        chosen = plan(service, Observed())
        check_cluster(Context(owner=make_owner(), service=service, plan=chosen, settings=SETTINGS))
    except PlanError as error:  # rules that only a cluster has
        return {line.partition(":")[0] for line in str(error).splitlines()}
    return service


def plain(field: str) -> str:
    """A field up to the first key of a mapping that stands in brackets: both write these in their own way."""
    return re.split(r"\[(?!\d+\])", field)[0]


def related(one: str, other: str) -> bool:
    """Whether two fields are one, or one holds the other."""
    return one == other or one.startswith((f"{other}.", f"{other}[")) or other.startswith((f"{one}.", f"{one}["))


def served(api_server: ApiServer, manifest: Object) -> Object | Refused:
    wanted = copy.deepcopy(manifest)
    wanted["metadata"]["namespace"] = "default"
    try:
        return api_server.client.create(wanted, dryRun="All", fieldValidation="Strict")
    except Refused as refused:
        return refused


def disagreement(manifest: Object, ours: InferenceService | set[str], theirs: Object | Refused) -> str | None:
    """What the two say differently about one manifest."""
    if isinstance(theirs, Refused):
        told = {plain(field) for field, _ in theirs.fields} | set(UNKNOWN.findall(theirs.message))
        if isinstance(ours, InferenceService):
            return f"only the server refuses it: {theirs}"
        if theirs.code not in (400, 422):
            return f"an answer of {theirs.code}: {theirs}"
        if not any(related(mine, theirs_too) for mine in ours for theirs_too in told):
            return f"the loader blames {sorted(ours)}, the server {sorted(told)}: {theirs}"
        return None
    if not isinstance(ours, InferenceService):
        return f"only the loader refuses it: {sorted(ours)}"
    read = load_object(theirs).spec
    return None if read == ours.spec else f"the loader reads {ours.spec!r}, the server {read!r}"


@pytest.mark.timeout(300)
def test_a_megabyte_anywhere_is_refused_by_both(api_server: ApiServer) -> None:
    """Text at every place of the manifest, of one, two and four bytes a character: each answer is a refusal, none takes
    long, and the server goes on."""
    wrong, slowest = [], 0.0
    for number, (path, _) in enumerate(PLACES):
        manifest = make_manifest()
        put(manifest, path, MEGABYTES[number % len(MEGABYTES)])
        begun = time.monotonic()
        theirs = served(api_server, manifest)
        slowest = max(slowest, time.monotonic() - begun)
        if not isinstance(theirs, Refused) or theirs.code not in (400, 413, 422):
            wrong.append((path, str(theirs)[:200]))
        with pytest.raises(ManifestError) as caught:
            load_manifest(json.dumps(manifest), "f.yaml")
        assert "accepts at most" in str(caught.value)
    assert not wrong, f"{len(wrong)} of {len(PLACES)}: {wrong[:5]}"
    assert slowest < 10.0
    assert not isinstance(served(api_server, make_manifest()), Refused)


@pytest.mark.parametrize("batch", range(max(1, MANIFESTS // BATCH)))
def test_one_verdict_and_one_meaning(api_server: ApiServer, batch: int) -> None:
    """Accepted by both with equal values, or refused by both with a field that both blame."""
    fuzz = Fuzz(batch)
    verdicts: dict[bool, int] = {True: 0, False: 0}
    wrong: list[Any] = []
    for _ in range(BATCH):
        manifest = fuzz.manifest()
        ours = loaded(manifest)
        verdicts[isinstance(ours, InferenceService)] += 1
        if (told := disagreement(manifest, ours, served(api_server, manifest))) is not None:
            wrong.append(f"{told}\n    {json.dumps(manifest, ensure_ascii=False)[:1500]}")
    assert not wrong, f"{len(wrong)} of {BATCH}:\n" + "\n".join(wrong[:10])
    assert min(verdicts.values()) >= BATCH // 20, "too few manifests of one kind"
