"""Faults of a manifest: from pydantic's errors to lines that say field, what was given and what is accepted."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvferry_operator.api.base import ACCEPTS, KEY_ACCEPTS, RULE, SECRET

Path = tuple[str | int, ...]
MAX_SHOWN_FAULTS = 50
MAX_SHOWN_CHARS = 60


class Fault(msgspec.Struct, frozen=True, order=True):
    """One thing wrong with a manifest. ``line`` counts from 1; ``field`` is empty for faults of the file itself."""

    line: int
    field: str
    text: str

    def show(self, filename: str) -> str:
        """The fault as one line for a terminal: ``file:line: field: text``."""
        return (
            f"{filename}:{self.line}: {self.field}: {self.text}"
            if self.field
            else f"{filename}:{self.line}: {self.text}"
        )


class ManifestError(ValueError):
    """A manifest that cannot be used, with every fault found in it, in the order of its lines."""

    def __init__(self, filename: str, faults: Sequence[Fault]) -> None:
        self.filename = filename
        self.faults = tuple(sorted(faults))
        lines = [fault.show(filename) for fault in self.faults[:MAX_SHOWN_FAULTS]]
        if len(self.faults) > MAX_SHOWN_FAULTS:
            lines.append(f"{filename}: and {len(self.faults) - MAX_SHOWN_FAULTS} more")
        super().__init__("\n".join(lines))


def dotted(path: Path) -> str:
    """A path as a user writes it: ``spec.decode.env[0].name``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif "." in part or "/" in part:
            text += f'["{part}"]'
        else:
            text += f".{part}" if text else part
    return text


def given(value: Any) -> str:
    """What was given, short: ``"two" (string)``, ``3.5 (number)``, ``a list of 2``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (boolean)"
    if isinstance(value, int):
        return f"{_cut(str(value))} (integer)"
    if isinstance(value, float):
        return f"{value} (number)"
    if isinstance(value, str):
        shown = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        shown = "".join(char if char.isprintable() else "?" for char in shown)
        return f'"{_cut(shown)}" (string)'
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "a mapping"


def type_name(value: Any) -> str:
    """What kind of value was given, without the value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "mapping"}
    return names.get(type(value), "null")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


class SchemaView:
    """Looks a path up in a JSON schema and says in words what is accepted there."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.root = schema
        self._definitions: Mapping[str, Any] = schema.get("$defs", {})

    def at(self, path: Path) -> Mapping[str, Any]:
        """The schema of the value at a path; empty where the path leads out of the schema."""
        schema = self.resolved(self.root)
        for part in path:
            if isinstance(part, int):
                below = schema.get("items", {})
            else:
                below = schema.get("properties", {}).get(part) or schema.get("additionalProperties") or {}
            schema = self.resolved(below if isinstance(below, Mapping) else {})
        return schema

    def resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema with its reference followed and ``null`` left out; the referring keywords win."""
        merged = dict(schema)
        while True:
            options = [option for option in merged.get("anyOf", ()) if option.get("type") != "null"]
            if "$ref" in merged:
                merged = {**self._definitions[merged.pop("$ref").rpartition("/")[2]], **merged}
            elif len(options) == 1:
                del merged["anyOf"]
                merged = {**options[0], **merged}
            else:
                return merged

    def fields(self, path: Path) -> list[str]:
        """Names of the fields of the mapping at a path."""
        return sorted(self.at(path).get("properties", {}))

    def accepts(self, path: Path) -> str:
        """What is accepted at a path, as it follows "accepts "."""
        return describe(self.at(path), self)


def describe(schema: Mapping[str, Any], view: SchemaView) -> str:
    """What a resolved schema accepts, in words."""
    if text := schema.get(ACCEPTS):
        return str(text)
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        values = [str(value) for value in schema["enum"]]
        return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return _range("an integer" if kind == "integer" else "a number", schema)
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        most = schema.get("maxLength")
        return f"a string of at most {most} characters" if most else "a string"
    if kind == "array":
        text = f"a list, each item {describe(view.resolved(schema['items']), view)}" if "items" in schema else "a list"
        return text + (f"; at most {schema['maxItems']} items" if "maxItems" in schema else "")
    if "properties" in schema:
        return f"a mapping with the fields {', '.join(sorted(schema['properties']))}"
    if kind == "object":
        return "a mapping" + (f" of at most {schema['maxProperties']} entries" if "maxProperties" in schema else "")
    return "another value"


def _range(noun: str, schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and most is not None:
        return f"{noun} from {_plain(least)} to {_plain(most)}"
    if least is not None:
        return f"{noun} of at least {_plain(least)}"
    return noun if most is None else f"{noun} of at most {_plain(most)}"


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def unknown_field(name: str, known: Sequence[str]) -> str:
    """The text for a field that does not exist, with the nearest that does."""
    folded = {field.lower(): field for field in known}
    near = difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), folded, n=1, cutoff=0.6)
    hint = f' (did you mean "{folded[near[0]]}"?)' if near else ""
    return f"unknown field{hint}; accepts {', '.join(known)}"


class LineLookup:
    """Lines of a document's parts: of a key (or list item) by its path."""

    def __init__(self, lines: Mapping[Path, int]) -> None:
        self._lines = lines

    def __call__(self, path: Path) -> int:
        """The line of the part at a path, or of the nearest part above it."""
        for end in range(len(path), -1, -1):
            line = self._lines.get(path[:end])
            if line is not None:
                return line
        return 1


def faults_of(error: ValidationError, view: SchemaView, line_of: LineLookup) -> list[tuple[Path, Fault]]:
    """Every fault of a validation: where it is, and the fault with the line of the nearest part that exists."""
    found: list[tuple[Path, Fault]] = []
    for details in error.errors(include_url=False):
        path: Path = details["loc"]
        if details["type"] == RULE:
            for field, text in details["ctx"]["broken"]:
                place = path + _rule_path(field)
                found.append((place, Fault(line_of(place), dotted(place), text)))
        elif path and path[-1] == "[key]":
            told = f"bad key {given(path[-2])}; accepts {_key_accepts(view, path[:-2])}"
            found.append((path[:-1], Fault(line_of(path[:-1]), dotted(path[:-2]), told)))
        else:
            found.append((path, Fault(line_of(path), dotted(path), _text(details, path, view))))
    return found


def _text(details: ErrorDetails, path: Path, view: SchemaView) -> str:
    if details["type"] == "extra_forbidden":
        return unknown_field(str(path[-1]), view.fields(path[:-1]))
    if details["type"] == "missing":
        return f"missing; accepts {view.accepts(path)}"
    shown = given(details["input"])
    if view.at(path).get(SECRET):
        shown = f"a value of type {type_name(details['input'])}"
    return f"got {shown}; accepts {view.accepts(path)}"


def _rule_path(field: str) -> Path:
    """The parts of a rule's path; a label's key (which may hold dots) is one part, always the last."""
    if field.startswith("labels."):
        return ("labels", field[len("labels.") :])
    return tuple(int(part) if part.isdigit() else part for part in field.split(".")) if field else ()


def _key_accepts(view: SchemaView, path: Path) -> str:
    return str(view.at(path).get(KEY_ACCEPTS, "another key"))
