"""A manifest with faults: each names its line, its field, what was given and what is accepted, all at once."""

import pytest
import yaml

from kvferry_operator.api import ManifestError, load_manifest
from kvferry_operator.api.faults import SchemaView
from kvferry_operator.api.validate import STAND_INS, manifest_schema
from tests.operator.manifests import make_manifest

HEAD = "apiVersion: serving.kvferry.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\nspec:\n"


def faults(text: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        load_manifest(text, "f.yaml")
    return str(caught.value).splitlines()


def test_every_fault_is_reported_in_one_go_in_the_order_of_lines() -> None:
    """Wrong types, unknown fields, missing fields and broken rules all come in one error."""
    text = (
        HEAD
        + """  model: {name: a, source: nosuch}
  engine:
    max_model_len: 5
    kvBlocks: 100
    kvMemory: 1Gi
    dtype: float64
  decode:
    replicas: "two"
    env: [{name: A, value: 1}, {name: A, value: x}]
    labels: {app.kubernetes.io/x: y}
  router:
    disaggregation: {maxCachedShare: 2, mode: always}
  transfer: {backend: nixl, lease: 0s}
"""
    )
    found = faults(text)
    places = [line.split(": ")[:2] for line in found]
    assert places == [
        ["f.yaml:5", "spec.model.source"],
        ["f.yaml:7", "spec.engine.max_model_len"],
        ["f.yaml:9", "spec.engine.kvMemory"],
        ["f.yaml:10", "spec.engine.dtype"],
        ["f.yaml:12", "spec.decode.replicas"],
        ["f.yaml:13", "spec.decode.env[0].value"],
        ["f.yaml:13", "spec.decode.env[1].name"],
        ["f.yaml:14", 'spec.decode.labels["app.kubernetes.io/x"]'],
        ["f.yaml:15", "spec.router.apiKeys"],
        ["f.yaml:16", "spec.router.disaggregation.maxCachedShare"],
        ["f.yaml:16", "spec.router.disaggregation.mode"],
        ["f.yaml:17", "spec.transfer.backend"],
        ["f.yaml:17", "spec.transfer.lease"],
    ]
    assert 'spec.decode.replicas: got "two" (string); accepts an integer from 0 to 64' in found[4]
    assert 'did you mean "maxModelLen"?' in found[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"spec__decode__replicas": 65}, "spec.decode.replicas: got 65 (integer); accepts an integer from 0 to 64"),
        ({"spec__decode__replicas": -1}, "spec.decode.replicas: got -1 (integer); accepts an integer from 0 to 64"),
        ({"spec__decode__replicas": True}, "spec.decode.replicas: got true (boolean); accepts an integer from 0 to 64"),
        ({"spec__decode__replicas": 1.5}, "spec.decode.replicas: got 1.5 (number); accepts an integer from 0 to 64"),
        ({"spec__decode": None}, "spec.decode: missing; accepts a mapping with the fields"),
        ({"spec__decode__env": [None]}, "spec.decode.env[0]: got null; accepts a mapping with the fields"),
        ({"spec__decode__rooter": None}, "spec.decode.rooter: unknown field"),
        ({"spec__router__port": 2.5}, "spec.router.port: got 2.5 (number); accepts an integer from 1 to 65535"),
        ({"spec__decode": ...}, "spec.decode: missing; accepts a mapping with the fields"),
        ({"spec__decode": []}, "spec.decode: got a list of 0; accepts a mapping with the fields"),
        ({"spec__router": ...}, "spec.router: missing; accepts a mapping"),
        ({"spec__router__auth": "open"}, 'spec.router.auth: got "open" (string); accepts none or apiKeys'),
        ({"spec__router__port": 0}, "spec.router.port: got 0 (integer); accepts an integer from 1 to 65535"),
        ({"spec__router__auth": ...}, "spec.router.apiKeys: missing; auth apiKeys"),
        ({"spec__router__apiKeys": {"keysFile": "k"}}, "spec.router.apiKeys: auth is none, which uses no keys"),
        ({"spec__router__requestDeadline": "1 hour"}, 'got "1 hour" (string); accepts a duration from 1s to 24h'),
        ({"spec__router__requestDeadline": 600}, "got 600 (integer); accepts a duration from 1s to 24h"),
        ({"spec__model__name": "a b"}, 'spec.model.name: got "a b" (string); accepts a name of at most 128'),
        ({"metadata__name": "a" * 64}, "accepts a name of at most 63 lower-case letters"),
        ({"metadata__name": "demo\n"}, 'metadata.name: got "demo\\n" (string)'),
        ({"spec__engine": {"kvMemory": "1Pi"}}, "spec.engine.kvMemory: got "),
        ({"spec__engine": {"kvMemory": 0}}, "spec.engine.kvMemory: got 0 (integer); accepts a number of bytes"),
        ({"spec__engine": {"tokenBudget": 4, "maxRunning": 8}}, "tokenBudget: got 4; accepts at least maxRunning (8)"),
        ({"spec__transfer": {"backend": "mooncake"}}, "spec.transfer.backend: mooncake is not built yet"),
        ({"spec__transfer": {"failurePolicy": "panic"}}, 'got "panic" (string); accepts recompute, retry or fail'),
        ({"spec__prefill__engine": {"blockSize": 32}}, "to ferry KV; got 32 and the engine's default"),
        ({"spec__prefill__engine": {"dtype": "float32"}}, "prefill.engine.dtype: must be equal for prefill and decode"),
        (
            {"spec__prefill__nodeSelector": {"a b": "c"}},
            'spec.prefill.nodeSelector: bad key "a b" (string); accepts a label key',
        ),
        ({"spec__decode__tolerations": [{"operator": "Equal"}]}, "spec.decode.tolerations[0].key: missing"),
        ({"spec__decode__resources": {"limits": {"cpu": "x"}}}, 'limits.cpu: got "x" (string); accepts a quantity'),
        ({"status": {}}, "status: unknown field; accepts apiVersion, kind, metadata, spec"),
    ],
)
def test_one_wrong_value_is_one_clear_fault(changes: dict[str, object], expected: str) -> None:
    """Each kind of wrong value is told with its field and what is accepted there, and nothing else is."""
    found = faults(yaml.safe_dump(make_manifest(**changes)))
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "f.yaml:1: empty; accepts one InferenceService"),
        ("# nothing\n", "f.yaml:1: empty"),
        ("- 1\n", "f.yaml:1: got a list of 1; accepts one InferenceService"),
        ("kind: Deployment\napiVersion: apps/v1\nspec: {a: 1}\n", 'f.yaml:1: kind: got "Deployment" (string)'),
        (HEAD + "  a: [\n", "not YAML: while parsing"),
        (HEAD + "  a: 1\n---\nb: 2\n", "f.yaml:6: a second document begins here"),
        (HEAD + "  a: 1\n  a: 2\n", "f.yaml:6: spec.a: given twice, first on line 5"),
        (HEAD + "  1: 2\n", "f.yaml:5: spec: got the key '1'; keys are strings"),
        (HEAD + "  a: !!python/object/apply:os.system [x]\n", "f.yaml:5: spec.a: got the YAML tag"),
        (HEAD + "  a: !!binary aGk=\n", "accepts plain values only"),
        (HEAD + "  a: !!int x\n", "the text does not fit its YAML type"),
        (HEAD + "  a: \x07\n", "f.yaml:5: not YAML: special characters are not allowed"),
        ("[" * 4000, "nested deeper than 32 levels"),
        ("a: &a [*a]\n", "grows beyond 32 levels through its aliases"),
        ("x" * 300_000, "300000 bytes; accepts at most 262144"),
        ("[" + "1," * 25_000 + "]", "more than 10000 values"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused_before_its_fields_are_looked_at(text: str, expected: str) -> None:
    """Broken YAML, foreign kinds, tags, floods and repeated keys are told by line, without executing anything."""
    assert expected in "\n".join(faults(text))


def test_an_alias_bomb_is_refused() -> None:
    """Aliases that would unfold to millions of values end at the cap, quickly."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "grows beyond 10000 values through its aliases" in "\n".join(faults("\n".join(lines)))


def test_a_huge_integer_is_a_fault_and_no_crash() -> None:
    """Python refuses to convert integers of thousands of digits; the manifest's author gets a line."""
    found = faults(HEAD + "  decode: {replicas: " + "9" * 5000 + "}\n")
    assert "f.yaml:5: spec.decode.replicas" in found[0]
    assert len(found[0]) < 400


def test_secrets_are_not_shown() -> None:
    """The value of an environment variable never gets into a fault."""
    found = faults(yaml.safe_dump(make_manifest(spec__decode__env=[{"name": "TOKEN", "value": 123456}])))
    assert "123456" not in found[0]
    assert "a value of type integer" in found[0]


def test_aliases_and_anchors_work_for_what_they_are_for() -> None:
    """Two pools may share their settings by an anchor."""
    text = (
        HEAD
        + "  model: {name: a, source: toy}\n  prefill: &pool {replicas: 2}\n  decode: *pool\n  router: {auth: none}\n"
    )
    service = load_manifest(text, "f.yaml")
    assert service.spec.prefill is not None
    assert service.spec.decode.replicas == service.spec.prefill.replicas == 2


def test_every_required_field_has_a_stand_in() -> None:
    """Rules between fields are checked beside wrong required fields only if each of these can be replaced."""
    view: SchemaView = manifest_schema()
    missing: list[tuple[str, ...]] = []

    def walk(path: tuple[str | int, ...]) -> None:
        schema = view.at(path)
        names = tuple(part for part in path if isinstance(part, str))
        for name in schema.get("required", ()):
            key = (*names, name) if len(names) < 1 else (names[-1], name)
            if key not in STAND_INS and (name,) not in STAND_INS:
                missing.append((*names, name))
        for name in schema.get("properties", {}):
            walk((*path, name))
        if "items" in schema:
            walk((*path, 0))

    walk(())
    assert not missing
