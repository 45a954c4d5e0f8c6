"""The table of bad manifests against a real API server: it refuses what `kvferry up` refuses, at the same field."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry_operator.api import ManifestError, load_manifest
from tests.operator.bad_manifests import BAD_MANIFESTS, IMMUTABLE, Bad
from tests.operator.manifests import make_manifest
from tests.support.api_server import ApiServer
from tests.support.kube_client import Object, Refused

DRY = {"dryRun": "All", "fieldValidation": "Strict"}


def placed(manifest: Object, namespace: str) -> Object:
    made = copy.deepcopy(manifest)
    made["metadata"]["namespace"] = namespace
    return made


def refusal(api_server: ApiServer, wanted: Object) -> Refused:
    with pytest.raises(Refused) as caught:
        api_server.client.create(wanted, **DRY)
    return caught.value


def blames(refused: Refused, bad: Bad) -> bool:
    """Whether an answer says the words of the table about its field."""
    if any(field == bad.api_field and bad.api_words in told for field, told in refused.fields):
        return True
    return f'{bad.api_words} "{bad.api_field}"' in refused.message  # a field that does not exist


@pytest.mark.parametrize("bad", BAD_MANIFESTS, ids=str)
def test_the_server_refuses_it(api_server: ApiServer, bad: Bad) -> None:
    """At the field, in the words of the table; and one fault is told once."""
    refused = refusal(api_server, placed(bad.manifest(), "default"))
    assert refused.code in (400, 422), refused
    assert blames(refused, bad), (refused.fields, refused.message)


@pytest.mark.parametrize("bad", IMMUTABLE, ids=str)
def test_the_server_refuses_the_change(api_server: ApiServer, namespace: str, bad: Bad) -> None:
    """What cannot be changed is said at the field."""
    api_server.client.create(placed(make_manifest(), namespace))
    with pytest.raises(Refused) as caught:
        api_server.client.apply(placed(bad.manifest(), namespace))
    assert blames(caught.value, bad), caught.value.fields


def test_several_faults_are_told_at_once(api_server: ApiServer) -> None:
    """Rules between fields are told beside each other, not one per attempt."""
    wanted = make_manifest(
        spec__router={"auth": "none", "apiKeys": {"secretRef": {"name": "k"}}},
        spec__transfer={"backend": "nixl", "lease": "0s"},
        spec__decode__engine={"tokenBudget": 4, "maxRunning": 8},
    )
    refused = refusal(api_server, placed(wanted, "default"))
    with pytest.raises(ManifestError) as caught:
        load_manifest(yaml.safe_dump(wanted), "f.yaml")
    assert {field for field, _ in refused.fields} == {fault.field for fault in caught.value.faults}


def test_kubectl_shows_the_words(api_server: ApiServer, namespace: str, tmp_path: Path) -> None:
    """What a user of `kubectl apply` reads is the rule's own sentence, with the field before it."""
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(make_manifest(spec__router={"port": 8000})))
    told = api_server.kubectl("apply", "-n", namespace, "-f", str(path), check=False)
    assert told.returncode != 0
    assert "spec.router.apiKeys" in told.stderr
    assert "missing; auth apiKeys (the default) needs it, auth none lets everyone in" in told.stderr


def test_kubectl_names_unknown_fields(api_server: ApiServer, namespace: str, tmp_path: Path) -> None:
    """Validation is strict by default: a misspelt field, however deep, is refused and not dropped."""
    wanted = make_manifest(spec__decode__engine={"maxmodellen": 9}, spec__rooter={})
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(wanted))
    told = api_server.kubectl("apply", "-n", namespace, "-f", str(path), check=False)
    assert told.returncode != 0
    assert 'unknown field "spec.decode.engine.maxmodellen"' in told.stderr
    assert 'unknown field "spec.rooter"' in told.stderr


MEGABYTE = 2**20


@pytest.mark.parametrize(
    "changes",
    [
        {"spec__model__name": "a" * MEGABYTE},
        {"spec__model__source": "org/" + "a" * MEGABYTE},
        {"spec__transfer": {"lease": "1" * MEGABYTE + "s"}},
        {"spec__engine": {"kvMemory": "1" * MEGABYTE}},
        {"spec__decode__env": [{"name": "A", "value": "x" * MEGABYTE}]},
        {"spec__decode__labels": {"a": "b" * MEGABYTE}},
        {"spec__decode__labels": {"a" * MEGABYTE: "b"}},
        {"spec__decode__annotations": {"a": "b" * MEGABYTE}},
        {"spec__decode__labels": {f"a{n}": "b" for n in range(20_000)}},
        {"spec__decode__env": [{"name": f"A{n}", "value": ""} for n in range(20_000)]},
        {"spec__router__ingress": {"host": ".".join(["a"] * 100_000)}},
        {"spec__decode__replicas": 10**400},
        {"spec__decode__replicas": 2**63},
        {"metadata__name": "a" * 64},
        {"spec__model__name": "模型"},
        {"spec__model__name": "a\u202eb"},
        {"spec__decode__image": "ﬁle"},
        {"spec__decode__labels": {"ключ": "x"}},
        {"spec__router__ingress": {"host": "пример.example"}},
        {"spec__model__source": "org/mod\u0000el"},
        {"spec__decode__nodeSelector": {"a": "é"}},
    ],
    ids=lambda changes: f"{next(iter(changes))} {len(str(changes))}",
)
def test_too_much_and_too_strange_is_refused_by_both(api_server: ApiServer, changes: dict[str, Any]) -> None:
    """A megabyte, twenty thousand items, digits without end, letters beyond ASCII where only ASCII has a meaning: it is
    a fault of the user, told as such, and the server answers the next request."""
    wanted = make_manifest(**changes)
    with pytest.raises(ManifestError):
        load_manifest(yaml.safe_dump(wanted, allow_unicode=True), "f.yaml")
    refused = refusal(api_server, placed(wanted, "default"))
    assert refused.code in (400, 413, 422), refused.code
    assert api_server.ready()


DEEP = '{"a":' * 20_000 + "{}" + "}" * 20_000


def test_deep_nesting_harms_nobody(api_server: ApiServer) -> None:
    """A free-form field twenty thousand levels deep is a fault to the loader and to the server, which both live on."""
    whole = json.dumps(placed(make_manifest(spec__decode__affinity={"nodeAffinity": "DEEP"}), "default"))
    body = whole.replace('"DEEP"', DEEP)
    with pytest.raises(ManifestError, match="nested"):
        load_manifest(body, "f.yaml")
    path = "/apis/serving.kvferry.dev/v1alpha1/namespaces/default/inferenceservices"
    status, answer = api_server.client.request("POST", path, body.encode(), **DRY)
    assert status in (400, 413, 422), answer[:300]
    assert api_server.ready()
