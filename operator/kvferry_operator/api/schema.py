"""Structural OpenAPI v3 schemas, as an API server takes them, from the pydantic types.

References are inlined; ``null`` arms and their defaults go; helper keywords (``x-...`` that are not Kubernetes' own)
become CEL rules that answer in the words of the local loader. What has no structural form is an error here.
"""

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from kvferry_operator.api.base import ACCEPTS, CEL, KEY_ACCEPTS, KEY_PATTERN, MAX_KEY
from kvferry_operator.api.rules import Rule, rules_of
from kvferry_operator.api.status import LIST_MAP

PRESERVE = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"
VALIDATIONS = "x-kubernetes-validations"

_KEPT = {
    "string": ("minLength", "maxLength", "pattern", "enum", "format"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
    "boolean": (),
}
_INTEGER_FORMAT = "int64"
# Lists that merge by a key of their items; others are replaced whole.
LIST_KEYS = {"EnvVar": "name"}


class SchemaError(ValueError):
    """A type that has no structural schema; the message names the place."""


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of a type, without ``$ref`` and without anything that an API server refuses.

    Raises:
        SchemaError: names the field and what stands in the way.
    """
    schema = model.model_json_schema(by_alias=True)
    return _Converter(schema.get("$defs", {})).convert({"title": model.__name__, **schema}, model.__name__)


class _Converter:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions

    def convert(self, raw: Mapping[str, Any], place: str) -> dict[str, Any]:
        schema, type_name = self._resolved(raw, place)
        out: dict[str, Any] = {}
        if text := schema.get("description"):
            out["description"] = " ".join(str(text).split())
        if schema.get(INT_OR_STRING):
            return {**out, **_int_or_string(schema)}
        if schema.get(PRESERVE):
            return {**out, "type": "object", PRESERVE: True}
        for keyword in ("anyOf", "oneOf", "allOf", "not", "patternProperties"):
            if keyword in schema:
                raise SchemaError(f"{place}: {keyword} has no structural form")
        kind = "string" if "const" in schema else schema.get("type")
        if kind == "object":
            out |= self._object(schema, type_name, place)
        elif kind == "array":
            out |= self._array(schema, place)
        elif kind in _KEPT:
            out |= _scalar(schema, str(kind))
        else:
            raise SchemaError(f"{place}: no type")
        return out

    def _resolved(self, raw: Mapping[str, Any], place: str) -> tuple[dict[str, Any], str]:
        """The schema with references and ``null`` arms gone, and the name of the type that it is."""
        merged, name = dict(raw), str(raw.get("title", "")) if "properties" in raw else ""
        while True:
            arms = [arm for arm in merged.get("anyOf", ()) if arm.get("type") != "null"]
            if "$ref" in merged:
                name = str(merged.pop("$ref")).rpartition("/")[2]
                merged = {**self._definitions[name], **merged}
            elif len(arms) == 1:
                del merged["anyOf"]
                merged = {**arms[0], **merged}
            else:
                return merged, name

    def _object(self, schema: Mapping[str, Any], type_name: str, place: str) -> dict[str, Any]:
        if "properties" not in schema:
            return self._mapping(schema, place)
        out: dict[str, Any] = {"type": "object"}
        if required := schema.get("required"):
            out["required"] = sorted(required)
        out["properties"] = {
            name: self.convert(inner, f"{place}.{name}") for name, inner in schema["properties"].items()
        }
        if isinstance(schema.get("default"), Mapping):
            if required:
                raise SchemaError(f"{place}: a default without the required fields {required}")
            # Written out: the server judges a default by the rules of the object before it fills in the fields' own.
            fields = {name: inner["default"] for name, inner in out["properties"].items() if "default" in inner}
            out["default"] = copy.deepcopy(fields)
        if rules := rules_of(type_name):
            out[VALIDATIONS] = [_validation(rule) for rule in rules]
        return out

    def _mapping(self, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        value = schema.get("additionalProperties")
        if not isinstance(value, Mapping) or "maxProperties" not in schema:
            raise SchemaError(f"{place}: a mapping needs a type of its values and a bound")
        out: dict[str, Any] = {
            "type": "object",
            "maxProperties": schema["maxProperties"],
            "additionalProperties": self.convert(value, f"{place}.*"),
        }
        if pattern := schema.get(KEY_PATTERN):
            rule = f"self.all(key, key.size() <= {MAX_KEY} && key.matches(r'{pattern}'))"
            out[VALIDATIONS] = [{"rule": rule, "message": f"bad key; accepts {schema[KEY_ACCEPTS]}"}]
        return out

    def _array(self, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        if "maxItems" not in schema:
            raise SchemaError(f"{place}: a list needs a bound")
        _, item_type = self._resolved(schema["items"], place)
        out: dict[str, Any] = {
            "type": "array",
            "maxItems": schema["maxItems"],
            "items": self.convert(schema["items"], f"{place}[]"),
        }
        if key := schema.get(LIST_MAP) or LIST_KEYS.get(item_type):
            out |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
        else:
            out["x-kubernetes-list-type"] = "atomic"
        return out


def _scalar(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    out: dict[str, Any] = {"type": kind}
    if kind == "integer":
        out["format"] = _INTEGER_FORMAT
    if "const" in schema:
        out["enum"] = [schema["const"]]
    out |= {keyword: schema[keyword] for keyword in _KEPT[kind] if keyword in schema}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in schema:  # a number in JSON Schema, a flag beside the bound in OpenAPI v3.0
            out |= {bound: schema[exclusive], exclusive: True}
    if kind == "string" and "enum" not in out and (accepts := schema.get(ACCEPTS)):
        rule = schema.get(CEL) or (f"self.matches(r'{out['pattern']}')" if "pattern" in out else None)
        if rule is not None:
            out.pop("pattern", None)
            out[VALIDATIONS] = [{"rule": rule, "message": f"accepts {accepts}"}]
    if (default := schema.get("default")) is not None:
        out["default"] = default
    return out


def _int_or_string(schema: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {INT_OR_STRING: True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    out |= {keyword: schema[keyword] for keyword in ("minimum", "maxLength", "pattern") if keyword in schema}
    return out


def _validation(rule: Rule) -> dict[str, Any]:
    out = {"rule": rule.rule, "message": rule.message}
    if rule.expression:
        out["messageExpression"] = rule.expression
    if rule.field:
        out["fieldPath"] = rule.field
    return out
