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
    BYTES_PATTERN,
    DURATION_PATTERN,
    MAX_TEXT,
    QUANTITY_PATTERN,
    parse_bytes,
    parse_duration,
    parse_quantity,
)
from kvferry_operator.api.source import ACCEPTS as SOURCE_ACCEPTS
from kvferry_operator.api.source import MAX_SOURCE, SOURCE_PATTERN, parse_source

ACCEPTS = "x-accepts"
KEY_ACCEPTS = "x-accepts-key"  # the same for the keys of a mapping
KEY_PATTERN = "x-pattern-key"  # and the pattern of those keys
MAX_KEY = 253  # characters of a mapping's key
CEL = "x-cel"  # what an API server evaluates in place of (or beside) a pattern, so that it answers in words
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


def _quantity(accepts: str, pattern: str, least: int) -> dict[str, Any]:
    return {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
        "pattern": pattern,
        "maxLength": MAX_TEXT,
        "minimum": least,
        ACCEPTS: accepts,
    }


def map_schema(value: dict[str, Any], key_accepts: str, key_pattern: str, most: int) -> WithJsonSchema:
    """The schema of a mapping: CRDs know no patterns for keys, so that keys are checked here and said in words."""
    return WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": value,
            "maxProperties": most,
            KEY_ACCEPTS: key_accepts,
            KEY_PATTERN: key_pattern,
        }
    )


_QUANTITY_SCHEMA = _quantity("a quantity such as 2, 500m or 4Gi", QUANTITY_PATTERN, 0)
Quantity = Annotated[
    str,
    BeforeValidator(_number_to_text),
    AfterValidator(_checked_quantity),
    WithJsonSchema(_QUANTITY_SCHEMA),
]
Bytes = Annotated[
    str,
    BeforeValidator(_number_to_text),
    AfterValidator(_checked_bytes),
    WithJsonSchema(_quantity("a number of bytes such as 512Mi or 2Gi", BYTES_PATTERN, 1)),
]
Source = Annotated[
    str,
    AfterValidator(_checked_source),
    Field(
        min_length=1,
        max_length=MAX_SOURCE,
        json_schema_extra={ACCEPTS: SOURCE_ACCEPTS, CEL: f"self.matches(r'{SOURCE_PATTERN}')"},
    ),
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
            "maxLength": MAX_TEXT,
            # The pattern goes first: what it refuses is no duration to CEL either.
            CEL: (
                f"self.matches(r'{DURATION_PATTERN}') && duration(self) >= duration('{least}')"
                f" && duration(self) <= duration('{most}')"
            ),
            ACCEPTS: f"a duration from {least} to {most}, such as 15s, 2m or 1m30s",
        }
    )


LeaseDuration = Annotated[str, _between("1s", "10m"), _duration_schema("1s", "10m")]
RequestDuration = Annotated[str, _between("1s", "24h"), _duration_schema("1s", "24h")]

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = rf"({_LABEL}(\.{_LABEL})*/)?"
LABEL_KEY = rf"^{_DOMAIN}[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"

_LABEL_KEY_ACCEPTS = "a label key such as team or example.com/team"
_LABEL_VALUE_ACCEPTS = "a label value: at most 63 letters, digits, '-', '_' or '.'"
LabelKey = Annotated[str, Field(pattern=LABEL_KEY, max_length=MAX_KEY, json_schema_extra={ACCEPTS: _LABEL_KEY_ACCEPTS})]
LabelValue = Annotated[
    str, Field(pattern=LABEL_VALUE, max_length=63, json_schema_extra={ACCEPTS: _LABEL_VALUE_ACCEPTS})
]
Labels = Annotated[
    dict[LabelKey, LabelValue],
    Field(max_length=64),
    map_schema(
        {"type": "string", "pattern": LABEL_VALUE, "maxLength": 63, ACCEPTS: _LABEL_VALUE_ACCEPTS},
        _LABEL_KEY_ACCEPTS,
        LABEL_KEY,
        64,
    ),
]
# As many and as long as an object may have: Kubernetes takes 256 KiB of annotations, keys and values together.
_ANNOTATIONS, _ANNOTATION = 48, 4096
Annotations = Annotated[
    dict[LabelKey, Annotated[str, Field(max_length=_ANNOTATION)]],
    Field(max_length=_ANNOTATIONS),
    map_schema({"type": "string", "maxLength": _ANNOTATION}, _LABEL_KEY_ACCEPTS, LABEL_KEY, _ANNOTATIONS),
]
_RESOURCE_ACCEPTS = "a resource's name such as cpu, memory or nvidia.com/gpu"
# Those of Kubernetes itself, and extended ones, which have a domain.
_RESOURCE_NAME = (
    r"^(cpu|memory|ephemeral-storage|hugepages-[1-9][0-9]*(Ki|Mi|Gi)"
    rf"|{_LABEL}(\.{_LABEL})*/[a-zA-Z0-9]([-a-zA-Z0-9_.]{{0,61}}[a-zA-Z0-9])?)$"
)
ResourceName = Annotated[str, Field(pattern=_RESOURCE_NAME, max_length=MAX_KEY)]
ResourceMap = Annotated[
    dict[ResourceName, Quantity],
    Field(max_length=16),
    map_schema(_QUANTITY_SCHEMA, _RESOURCE_ACCEPTS, _RESOURCE_NAME, 16),
]
DnsName = Annotated[
    str,
    Field(
        pattern=DNS_LABEL,
        min_length=1,
        max_length=63,
        json_schema_extra={ACCEPTS: "a name of at most 63 lower-case letters, digits and '-'"},
    ),
]


class SecretReference(ManifestModel):
    """Names a Secret of the service's namespace."""

    name: DnsName
    """The Secret's name."""
