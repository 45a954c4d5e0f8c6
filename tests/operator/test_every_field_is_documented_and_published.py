"""What users read of the types: descriptions, the reference page, the examples."""

from pathlib import Path

import pytest

from kvferry_operator.api import InferenceService, load_manifest
from kvferry_operator.api.faults import SchemaView, describe
from kvferry_operator.api.reference import reference

ROOT = Path(__file__).parents[2]


def test_every_field_has_a_description_and_says_what_it_accepts() -> None:
    """Descriptions become `kubectl explain`, so no field may lack one; no field accepts "another value"."""
    view = SchemaView(InferenceService.model_json_schema(by_alias=True))
    bare: list[str] = []

    def walk(path: tuple[str | int, ...]) -> None:
        for name, raw in view.at(path).get("properties", {}).items():
            here = (*path, name)
            field = view.resolved(raw)
            if not (raw.get("description") or field.get("description")) or describe(field, view) == "another value":
                bare.append(".".join(map(str, here)))
            walk(here)
            if "items" in field:
                walk((*here, 0))

    walk(())
    assert not bare


def test_the_reference_page_is_current() -> None:
    """docs/manifest.md is what the types say; `make docs` writes it."""
    assert (ROOT / "docs" / "manifest.md").read_text() == reference()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_load(example: Path) -> None:
    """Each example is a manifest without faults."""
    assert load_manifest(example.read_text(), example.name).spec.decode.replicas >= 1
