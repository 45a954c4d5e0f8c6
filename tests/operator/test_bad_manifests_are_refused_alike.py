"""One table of bad manifests: `kvferry up` refuses each, and so does the CRD, at the same field in the same words."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvferry_operator.api import ManifestError, load_manifest
from kvferry_operator.api.crds import service_crd
from kvferry_operator.api.rules import BASES, RULES
from tests.operator import bad_manifests
from tests.operator.bad_manifests import BAD_MANIFESTS, Bad
from tests.operator.structural import refusals

SCHEMA = service_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
LITERAL = re.compile(r"'((?:\\.|[^'\\])*)'")


@pytest.mark.parametrize("bad", [bad for bad in BAD_MANIFESTS if bad.only != "cluster"], ids=str)
def test_the_loader_refuses_it(bad: Bad) -> None:
    """One fault, at the field, in the words of the table."""
    with pytest.raises(ManifestError) as caught:
        load_manifest(yaml.safe_dump(bad.manifest()), "f.yaml")
    (fault,) = caught.value.faults
    assert fault.field == bad.field
    assert bad.words in fault.text


@pytest.mark.parametrize("bad", [*bad_manifests.CLUSTER, *bad_manifests.IMMUTABLE], ids=str)
def test_what_only_a_cluster_refuses_one_machine_takes(bad: Bad) -> None:
    """Rules about clusters are no faults of the manifest."""
    assert load_manifest(yaml.safe_dump(bad.manifest()), "f.yaml")


@pytest.mark.parametrize("bad", [*bad_manifests.VALUES, *bad_manifests.WORDS], ids=str)
def test_the_schema_refuses_its_values(bad: Bad) -> None:
    """Types, bounds, enumerations and formats are refused at the same field."""
    found = list(refusals(bad.manifest(), SCHEMA))
    if bad.field == "metadata.name":
        assert any(bad.words in rule["message"] for rule in SCHEMA["x-kubernetes-validations"])
    else:
        assert any(field == bad.field and bad.api_words in text for field, text in found), found


def rules_at(field: str) -> Iterator[dict[str, Any]]:
    """The rules that blame a field, wherever above it they stand."""
    parts = re.sub(r"\[\d+\]", ".[]", field.partition('["')[0]).split(".")
    schema = SCHEMA
    for index in range(len(parts) + 1):
        rest = "".join(f".{part}" for part in parts[index:])
        yield from (rule for rule in schema.get("x-kubernetes-validations", ()) if rule.get("fieldPath", "") == rest)
        if index < len(parts):
            schema = schema["items"] if parts[index] == "[]" else schema["properties"][parts[index]]


def says(rule: dict[str, Any]) -> re.Pattern[str]:
    """A pattern of what a rule says: its literals, with anything where it tells a value."""
    if "messageExpression" not in rule:
        return re.compile(re.escape(rule["message"]))
    parts = [LITERAL.fullmatch(part) for part in rule["messageExpression"].split(" + ")]
    return re.compile("".join(".*" if part is None else re.escape(part[1].replace("\\'", "'")) for part in parts))


@pytest.mark.parametrize("bad", [*bad_manifests.RULES, *bad_manifests.CLUSTER, *bad_manifests.IMMUTABLE], ids=str)
def test_the_schema_has_the_rule_in_the_same_words(bad: Bad) -> None:
    """A rule between fields blames the same field, and can say what the loader says."""
    if bad.only == "cluster":
        assert any(bad.words in rule["message"] for rule in rules_at(bad.field))
        return
    with pytest.raises(ManifestError) as caught:
        load_manifest(yaml.safe_dump(bad.manifest()), "f.yaml")
    text = caught.value.faults[0].text
    found = [said[0] for rule in rules_at(bad.field) if (said := says(rule).search(text))]
    assert any(bad.words in said for said in found), (text, list(rules_at(bad.field)))


def test_every_rule_of_the_manifest_has_a_bad_manifest() -> None:
    """No rule goes untried against an API server."""
    tried = {
        id(rule)
        for bad in (*bad_manifests.RULES, *bad_manifests.CLUSTER, *bad_manifests.IMMUTABLE)
        for rule in rules_at(bad.field)
    }
    untried = []
    for type_name in RULES.keys() - {"RoleSpec"}:
        for rule in RULES[type_name]:
            standing = [
                found for found in _standing(SCHEMA) if found["message"] == rule.message and found["rule"] == rule.rule
            ]
            if not any(id(found) in tried for found in standing):
                untried.append(f"{type_name}: {rule.message}")
    assert not untried
    assert all(base in RULES for bases in BASES.values() for base in bases)


def _standing(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from schema.get("x-kubernetes-validations", ())
    for inner in schema.get("properties", {}).values():
        yield from _standing(inner)
    if "items" in schema:
        yield from _standing(schema["items"])
