"""The CRDs: structural, documented, bounded, and as the types say."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, Field

from kvferry_operator.api.crds import crd_files, crds, main
from kvferry_operator.api.schema import SchemaError, structural
from tests.operator.structural import faults, refusals

ROOT = Path(__file__).parents[2]
CRDS = {crd["spec"]["names"]["kind"]: crd for crd in crds().values()}


def schema_of(kind: str) -> dict[str, Any]:
    version = CRDS[kind]["spec"]["versions"][0]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


@pytest.mark.parametrize("folder", ["crds", "charts/kvferry/files/crds"])
def test_the_files_are_current(folder: str) -> None:
    """`make crds` writes them; a change of the types without it fails here."""
    lying = {path.name: path.read_text("utf-8") for path in (ROOT / folder).glob("*.yaml")}
    assert lying == crd_files()


def test_writing_removes_the_file_of_a_crd_that_is_gone(tmp_path: Path) -> None:
    """A folder holds the CRDs of now and nothing older."""
    (tmp_path / "serving.kvferry.dev_old.yaml").write_text("x")
    (tmp_path / "other.yaml").write_text("x")
    assert main([str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"other.yaml", *crd_files()}


@pytest.mark.parametrize("kind", sorted(CRDS))
def test_schemas_are_structural(kind: str) -> None:
    """Types everywhere, no reference, no foreign keyword, bounds, descriptions, rules whose fields exist."""
    assert not list(faults(schema_of(kind)))


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "description": "x"}}}, "unbounded string"),
        ({"type": "object", "$ref": "#/x"}, "$ref is not allowed"),
        ({"type": "array", "maxItems": 1}, "a list needs items"),
        ({"type": "object", "additionalProperties": {"type": "boolean"}}, "unbounded mapping"),
        ({"type": "integer", "default": 0, "minimum": 1}, "its own default is refused"),
        ({"type": "string", "maxLength": 9, "pattern": "^(?=a)$"}, "not RE2"),
        ({"type": "object", "x-kubernetes-validations": [{"rule": "has(self.a", "message": "a"}]}, "unbalanced ()"),
        (
            {"type": "object", "x-kubernetes-validations": [{"rule": "true", "message": "a", "fieldPath": ".a"}]},
            "leads to no field",
        ),
    ],
)
def test_the_linter_finds_each_kind_of_fault(broken: dict[str, Any], expected: str) -> None:
    """The linter itself is tried on one fault of each kind."""
    assert any(expected in fault for fault in faults(broken))


def test_unions_and_open_mappings_are_no_schema() -> None:
    """What has no structural form is an error that names the field, not a CRD that a server refuses."""

    class Union(BaseModel):
        a: int | list[int]

    class Open(BaseModel):
        b: dict[str, Any]

    class Unbounded(BaseModel):
        c: list[int] = Field(default_factory=list)

    for model, place in ((Union, r"Union\.a"), (Open, r"Open\.b"), (Unbounded, r"Unbounded\.c")):
        with pytest.raises(SchemaError, match=place):
            structural(model)


def test_names_columns_and_subresources() -> None:
    """Short names, categories, status, /scale, and the columns that `kubectl get` shows, wide ones last."""
    service, role = CRDS["InferenceService"]["spec"], CRDS["InferenceServiceRole"]["spec"]
    assert (service["names"]["shortNames"], role["names"]["shortNames"]) == (["infsvc"], ["infsvcrole"])
    assert service["names"]["categories"] == role["names"]["categories"] == ["kvferry"]
    (version,) = service["versions"]
    assert version["subresources"] == {"status": {}}
    columns = [(column["name"], column.get("priority", 0)) for column in version["additionalPrinterColumns"]]
    assert [name for name, priority in columns if not priority] == [
        "Model", "Prefill", "Decode", "Ready", "URL", "Age",
    ]  # fmt: skip
    assert [name for name, priority in columns if priority] == ["Revision", "Path", "Why"]
    (version,) = role["versions"]
    assert version["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_status_can_be_written_in_parts() -> None:
    """Nothing but the keys of lists is required in a status, so that a first write with one field is accepted."""
    status = schema_of("InferenceService")["properties"]["status"]
    for part in ({}, {"revision": "a"}, {"conditions": [{"type": "Ready"}]}, {"roles": [{"name": "decode"}]}):
        assert not list(refusals(part, status))
    for field, key in (("conditions", "type"), ("roles", "name")):
        assert status["properties"][field]["x-kubernetes-list-map-keys"] == [key]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_pass_the_schema(example: Path) -> None:
    """What works on a laptop is accepted by the API server."""
    assert not list(refusals(yaml.safe_load(example.read_text()), schema_of("InferenceService")))
