"""The manifest's reference as Markdown, from the types: ``python -m kvferry_operator.api.reference``."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from kvferry_operator.api.faults import SchemaView, describe
from kvferry_operator.api.service import InferenceService

HEAD = """\
# The manifest

<!-- Written by `make docs` from operator/kvferry_operator/api; a test fails when it is stale. -->

One `InferenceService` says what is served: the model, the two pools, the router and how KV is ferried. `kvferry up`
runs it on one machine. An unknown or wrong field is refused with its line, what was given and what is accepted, all
faults at once. `examples/` holds manifests that work as they are.

Durations are written as `15s`, `2m` or `1m30s`, quantities as in Kubernetes (`512Mi`, `500m`).
"""


def reference() -> str:
    """The whole page."""
    schema = InferenceService.model_json_schema(by_alias=True)
    return "\n".join([HEAD, *_Page(SchemaView(schema)).tables("", schema)])


class _Page:
    """Writes one table per type, where it is met first; later places refer to it."""

    def __init__(self, view: SchemaView) -> None:
        self._view = view
        self._places: dict[str, str] = {}  # type -> path of its table

    def tables(self, path: str, schema: Mapping[str, Any]) -> Iterator[str]:
        """The table of an object, then those of the objects in it."""
        yield f"## `{path}`\n" if path else "## Top level\n"
        if text := schema.get("description"):
            yield f"{_line(text)}\n"
        yield "| field | accepts | default | meaning |\n|---|---|---|---|"
        required = set(schema.get("required", ()))
        below: list[tuple[str, Mapping[str, Any]]] = []
        for name, raw in schema["properties"].items():
            field = self._view.resolved(raw)
            accepts = self._object(f"{path}.{name}" if path else name, raw, field, below)
            meaning = raw.get("description") or field.get("description", "")
            yield (
                f"| `{name}` | {_cell(accepts or describe(field, self._view))} "
                f"| {_default(field, name in required)} | {_cell(meaning)} |"
            )
        yield ""
        for here, inner in below:
            yield from self.tables(here, inner)

    def _object(
        self, path: str, raw: Mapping[str, Any], field: Mapping[str, Any], below: list[tuple[str, Mapping[str, Any]]]
    ) -> str:
        """What a field accepts that is an object or lists objects, else an empty text; new types go to ``below``."""
        listed = field.get("type") == "array"
        source = field.get("items", {}) if listed else raw
        inner = self._view.resolved(source)
        if "properties" not in inner:
            return ""
        noun = "a list of objects" if listed else "an object"
        kind = str(inner.get("title", path))
        if kind in self._places:
            return f"{noun}, as `{self._places[kind]}`"
        self._places[kind] = path
        below.append(
            (path + "[]" if listed else path, {**inner, **({} if listed else {"description": raw_text(raw, inner)})})
        )
        return noun


def raw_text(raw: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    """The description of a field, else of its type."""
    return str(raw.get("description") or inner.get("description", ""))


def _default(field: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    value = field.get("default")
    if value is None or isinstance(value, dict | list):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
