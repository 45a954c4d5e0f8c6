"""What all manifest types share: camelCase names, no unknown fields, no silent conversion; and the scalar types.

A field's description is what `kubectl explain` and ``docs/manifest.md`` show. ``x-accepts`` in a field's schema is the
text for "accepts ..." in a fault where the schema's own keywords do not say it well.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kvferry_operator.api.quantities import (
    DURATION_PATTERN,
    QUANTITY_PATTERN,
    parse_bytes,
    parse_duration,
    parse_quantity,
)
from kvferry_operator.api.source import ACCEPTS as SOURCE_ACCEPTS
from kvferry_operator.api.source import MAX_SOURCE, parse_source

ACCEPTS = "x-accepts"
SECRET = "x-secret"  # noqa: S105 - the name of a schema keyword: a fault shows no value of such a field
RULE = "rule"


class ManifestModel(BaseModel):
    """Base of the manifest types. Values are taken by their camelCase names only."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_default=False,
    )


def raise_broken(broken: Sequence[tuple[str, str]]) -> None:
    """Raise the error of broken rules between fields, if any.

    Args:
        broken: per rule, the dotted camelCase path below the validated object (items by number) and the fault's text.
    """
    if broken:
        raise PydanticCustomError(RULE, "rules between fields", {"broken": list(broken)})


def _number_to_text(value: Any) -> Any:
    """Quantities may be written as plain integers, as Kubernetes takes them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _checked_quantity(value: str) -> str:
    parse_quantity(value)
    return value


def _checked_bytes(value: str) -> str:
    parse_bytes(value)
    return value


def _checked_source(value: str) -> str:
    parse_source(value)
    return value


def _quantity_schema(accepts: str) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            ACCEPTS: accepts,
        }
    )


Quantity = Annotated[
    str,
    BeforeValidator(_number_to_text),
    AfterValidator(_checked_quantity),
    _quantity_schema("a quantity such as 2, 500m or 4Gi"),
]
Bytes = Annotated[
    str,
    BeforeValidator(_number_to_text),
    AfterValidator(_checked_bytes),
    _quantity_schema("a number of bytes such as 512Mi or 2Gi"),
]
Source = Annotated[
    str,
    AfterValidator(_checked_source),
    Field(min_length=1, max_length=MAX_SOURCE, json_schema_extra={ACCEPTS: SOURCE_ACCEPTS}),
]


def _between(least: str, most: str) -> AfterValidator:
    def check(value: str) -> str:
        if not parse_duration(least) <= parse_duration(value) <= parse_duration(most):
            raise ValueError(f"not from {least} to {most}: {value!r}")
        return value

    return AfterValidator(check)


def _duration_schema(least: str, most: str) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "type": "string",
            "pattern": DURATION_PATTERN,
            ACCEPTS: f"a duration from {least} to {most}, such as 15s, 2m or 1m30s",
        }
    )


LeaseDuration = Annotated[str, _between("1s", "10m"), _duration_schema("1s", "10m")]
RequestDuration = Annotated[str, _between("1s", "24h"), _duration_schema("1s", "24h")]

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"

LabelKey = Annotated[
    str,
    Field(
        pattern=LABEL_KEY, max_length=253, json_schema_extra={ACCEPTS: "a label key such as team or example.com/team"}
    ),
]
LabelValue = Annotated[
    str,
    Field(
        pattern=LABEL_VALUE,
        max_length=63,
        json_schema_extra={ACCEPTS: "a label value: at most 63 letters, digits, '-', '_' or '.'"},
    ),
]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
AnnotationValue = Annotated[str, Field(max_length=65536)]
Annotations = Annotated[dict[LabelKey, AnnotationValue], Field(max_length=64)]
DnsName = Annotated[
    str,
    Field(
        pattern=DNS_LABEL,
        min_length=1,
        max_length=63,
        json_schema_extra={ACCEPTS: "a name of at most 63 lower-case letters, digits and '-'"},
    ),
]
