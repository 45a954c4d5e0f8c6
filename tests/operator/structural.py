"""What an API server demands of a structural schema, and what it then refuses, as far as that can be done without one.

Stricter than the server in one thing: every string, list and mapping that a rule reads has a bound.
"""

import re
from collections.abc import Iterator
from typing import Any

from kvferry_operator.api.quantities import parse_duration

ALLOWED = {
    "type", "description", "properties", "required", "items", "additionalProperties", "default", "enum", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "minItems",
    "maxItems", "maxProperties", "anyOf", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
}  # fmt: skip
OF_TYPE = {
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "maxProperties",
        "x-kubernetes-preserve-unknown-fields",
    },
    "array": {"items", "minItems", "maxItems", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"},
    "string": {"minLength", "maxLength", "pattern", "enum", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format", "enum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum"},
    "boolean": set(),
}
COMMON = {"type", "description", "default", "x-kubernetes-validations"}
PYTHON_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
RE2_LACKS = re.compile(r"\(\?[=!<P]|\\[1-9]|\(\?>")
MATCHES = re.compile(r"self\.matches\(r'(.*?)'\)")
DURATIONS = re.compile(r"duration\(self\) >= duration\('(.*?)'\) && duration\(self\) <= duration\('(.*?)'\)$")
MAX_MESSAGE = 2048


def faults(schema: dict[str, Any], place: str = "") -> Iterator[str]:
    """What an API server would say against the schema itself."""
    yield from (f"{place}: {keyword} is not allowed" for keyword in schema.keys() - ALLOWED)
    yield from _rule_faults(schema, place)
    if schema.get("x-kubernetes-int-or-string"):
        if "type" in schema or schema.get("anyOf") != [{"type": "integer"}, {"type": "string"}]:
            yield f"{place}: int-or-string has no type and exactly the two arms"
        if "maxLength" not in schema:
            yield f"{place}: unbounded text"
        return
    kind = schema.get("type")
    if kind not in PYTHON_TYPES:
        yield f"{place}: type {kind!r}"
        return
    yield from (f"{place}: {keyword} in {kind}" for keyword in schema.keys() - COMMON - OF_TYPE[kind])
    if "default" in schema and any(refusals(schema["default"], schema)):
        yield f"{place}: its own default is refused"
    if kind == "object":
        yield from _object_faults(schema, place)
    elif kind == "array":
        yield from _array_faults(schema, place)
    elif kind == "string" and not {"maxLength", "enum"} & schema.keys() and place not in UNBOUNDED:
        yield f"{place}: unbounded string"
    if "pattern" in schema:
        yield from _pattern_faults(schema["pattern"], place)


UNBOUNDED = {".apiVersion", ".kind"}


def _object_faults(schema: dict[str, Any], place: str) -> Iterator[str]:
    if "properties" in schema and "additionalProperties" in schema:
        yield f"{place}: properties beside additionalProperties"
    yield from (
        f"{place}: requires unknown {name}" for name in schema.get("required", ()) if name not in schema["properties"]
    )
    for name, inner in schema.get("properties", {}).items():
        if not inner.get("description") and place != ".metadata" and name != "metadata":
            yield f"{place}.{name}: no description"
        yield from faults(inner, f"{place}.{name}")
    if "additionalProperties" in schema:
        if "maxProperties" not in schema:
            yield f"{place}: unbounded mapping"
        if not isinstance(schema["additionalProperties"], dict):
            yield f"{place}: additionalProperties must be a schema"
        else:
            yield from faults(schema["additionalProperties"], f"{place}.*")


def _array_faults(schema: dict[str, Any], place: str) -> Iterator[str]:
    if "items" not in schema or "maxItems" not in schema:
        yield f"{place}: a list needs items and maxItems"
        return
    kind, keys = schema.get("x-kubernetes-list-type"), schema.get("x-kubernetes-list-map-keys", [])
    if (kind == "map") != bool(keys) or kind not in ("map", "set", "atomic"):
        yield f"{place}: list type {kind!r} with keys {keys}"
    for key in keys:
        item = schema["items"]
        if key not in item.get("required", ()) and "default" not in item["properties"][key]:
            yield f"{place}: the key {key} is neither required nor has a default"
    yield from faults(schema["items"], f"{place}[]")


def _rule_faults(schema: dict[str, Any], place: str) -> Iterator[str]:
    seen = set()
    for rule in schema.get("x-kubernetes-validations", ()):
        if not rule.keys() <= {"rule", "message", "messageExpression", "fieldPath", "reason"}:
            yield f"{place}: rule with {sorted(rule)}"
        if (said := rule.get("message", "")) != said.strip() or not said or "\n" in said or len(said) > MAX_MESSAGE:
            yield f"{place}: message {said!r}"
        if (rule["rule"], rule.get("fieldPath")) in seen:
            yield f"{place}: twice the rule {rule['rule']}"
        seen.add((rule["rule"], rule.get("fieldPath")))
        for text in (rule["rule"], rule.get("messageExpression", "")):
            yield from (f"{place}: {text}: {what}" for what in _cel_faults(text))
        yield from (
            fault for pattern in re.findall(r"r'(.*?)'", rule["rule"]) for fault in _pattern_faults(pattern, place)
        )
        if (path := rule.get("fieldPath")) and not _has(schema, path):
            yield f"{place}: fieldPath {path} leads to no field"


def _has(schema: dict[str, Any], path: str) -> bool:
    if not path.startswith("."):
        return False
    for name in path[1:].split("."):
        if name not in schema.get("properties", {}):
            return False
        schema = schema["properties"][name]
    return True


def _cel_faults(text: str) -> Iterator[str]:
    bare = re.sub(r"r'[^']*'|'(?:\\.|[^'\\])*'", "''", text)
    for opening, closing in ("()", "[]", "{}"):
        if bare.count(opening) != bare.count(closing):
            yield f"unbalanced {opening}{closing}"
    if bare.count("'") % 2 or '"' in bare:
        yield "unbalanced quotes"


def _pattern_faults(pattern: str, place: str) -> Iterator[str]:
    if RE2_LACKS.search(pattern) or not (pattern.startswith("^") and pattern.endswith("$")):
        yield f"{place}: the pattern {pattern} is not anchored, or not RE2"
    if any(int(most) > 1000 for most in re.findall(r"\{\d*,(\d+)\}", pattern)):
        yield f"{place}: the pattern {pattern} repeats too often for RE2"
    re.compile(pattern, re.ASCII)


def refusals(value: Any, schema: dict[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Field and kind of everything that the schema refuses in a value. Of CEL only formats are evaluated."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield place, "must be of type integer or string"
        elif isinstance(value, str) and not re.fullmatch(schema["pattern"], value, re.ASCII):
            yield place, "should match"
        elif isinstance(value, int) and value < schema.get("minimum", value):
            yield place, f"greater than or equal to {schema['minimum']}"
        return
    kind = schema["type"]
    if not isinstance(value, PYTHON_TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield place, f"must be of type {kind}"
        return
    if kind == "object":
        yield from _object_refusals(value, schema, place)
    elif kind == "array":
        yield from _array_refusals(value, schema, place)
    elif "enum" in schema and value not in schema["enum"]:
        yield place, "Unsupported value"
    elif kind in ("integer", "number"):
        if value < schema.get("minimum", value):
            yield place, f"greater than or equal to {schema['minimum']}"
        if value > schema.get("maximum", value):
            yield place, f"less than or equal to {schema['maximum']}"
    elif kind == "string":
        if len(value) > schema.get("maxLength", len(value)):
            yield place, "Too long"
        rules = schema.get("x-kubernetes-validations", ())
        yield from ((place, rule["message"]) for rule in rules if not _fits(value, rule["rule"]))


def _fits(value: str, rule: str) -> bool:
    """Whether a text keeps a rule about its format."""
    if any(not re.search(pattern, value, re.ASCII) for pattern in MATCHES.findall(rule)):
        return False
    bounds = DURATIONS.search(rule)
    return bounds is None or parse_duration(bounds[1]) <= parse_duration(value) <= parse_duration(bounds[2])


def _object_refusals(value: dict[str, Any], schema: dict[str, Any], place: str) -> Iterator[tuple[str, str]]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place}.{name}".lstrip("."), "Required value"
    if "properties" not in schema and "additionalProperties" not in schema:
        return
    for name, inner in value.items():
        here = f"{place}.{name}".lstrip(".")
        below = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
        if below is None:
            yield here, "unknown field"
        else:
            yield from refusals(inner, below, here)
    for rule in schema.get("x-kubernetes-validations", ()):
        for pattern in re.findall(r"^self\.all\(key, key\.size\(\) <= \d+ && key\.matches\(r'(.*)'\)\)$", rule["rule"]):
            if not all(re.search(pattern, key, re.ASCII) for key in value):
                yield place, rule["message"]


def _array_refusals(value: list[Any], schema: dict[str, Any], place: str) -> Iterator[tuple[str, str]]:
    if len(value) > schema["maxItems"]:
        yield place, "Too many"
    seen = set()
    for index, item in enumerate(value):
        yield from refusals(item, schema["items"], f"{place}[{index}]")
        if keys := schema.get("x-kubernetes-list-map-keys"):
            mark = tuple(item.get(key) for key in keys)
            if mark in seen:
                yield f"{place}[{index}].{keys[0]}", "Duplicate value"
            seen.add(mark)
