"""What an API server does to an object before it judges it, done here as well, so that both read one file alike.

A field without a value is as if it were not there, and a whole number is an integer however it is written (``2.0``).
Free-form mappings stay as they are.
"""

from collections.abc import Mapping
from typing import Any

from kvferry_operator.api.faults import SchemaView

EXACT = 2**53  # beyond it a float is no certain integer


def normalized(value: Any, schema: Mapping[str, Any], view: SchemaView) -> Any:
    """A copy of a value in the form that is judged; what the schema does not know is left for its faults."""
    schema = view.resolved(schema)
    if isinstance(value, dict):
        fields, entries = schema.get("properties", {}), schema.get("additionalProperties")
        inner = {name: fields.get(name, entries) for name in value}
        return {
            name: normalized(item, inner[name], view) if isinstance(inner[name], Mapping) else item
            for name, item in value.items()
            if item is not None or not isinstance(inner[name], Mapping)
        }
    if isinstance(value, list):
        items = schema.get("items")
        return [normalized(item, items, view) for item in value] if isinstance(items, Mapping) else value
    whole = isinstance(value, float) and value.is_integer() and abs(value) <= EXACT
    return int(value) if whole and _takes_integers(schema) else value


def _takes_integers(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "integer" or bool(schema.get("x-kubernetes-int-or-string"))
