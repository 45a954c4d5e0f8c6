"""The status of an ``InferenceService``: what the operator writes. No field but list keys is required, so that a
status can be written in parts."""

from typing import Annotated, Literal

from pydantic import Field

from kvferry_operator.api.base import ManifestModel

LIST_MAP = "x-list-map"  # the key of a list's items, by which the API server merges them

ConditionType = Literal["Ready", "Progressing", "PrefillReady", "DecodeReady", "RouterReady", "KVTransferEffective"]
ConditionStatus = Literal["True", "False", "Unknown"]
Generation = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(max_length=1024)]


class Condition(ManifestModel):
    """One thing that holds, does not hold, or is not known."""

    type: ConditionType
    """What it is about."""

    status: ConditionStatus | None = None
    """Whether it holds."""

    reason: Annotated[str, Field(max_length=256)] | None = None
    """Why, in one word for programs."""

    message: Annotated[str, Field(max_length=8192)] | None = None
    """Why, for people, with what to do about it."""

    observed_generation: Generation | None = None
    """The generation of the spec that this was said of."""

    last_transition_time: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})] | None = None
    """When `status` changed last."""


class RoleStatus(ManifestModel):
    """The pods of one role."""

    name: Literal["prefill", "decode", "router"]
    """The role."""

    ready: Text | None = None
    """Ready pods of those wanted, such as `1/2`."""

    replicas: Count | None = None
    """Pods that are wanted."""

    ready_replicas: Count | None = None
    """Pods that would answer a request now, of the wanted revision."""

    old_replicas: Count | None = None
    """Pods of earlier revisions that still run."""


class InferenceServiceStatus(ManifestModel):
    """What is, as far as the operator sees it."""

    observed_generation: Generation | None = None
    """The generation of the spec that this status was made for."""

    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra={LIST_MAP: "type"})] | None = None
    """What holds and why; `Ready` follows from the others."""

    roles: Annotated[list[RoleStatus], Field(max_length=8, json_schema_extra={LIST_MAP: "name"})] | None = None
    """The pods of each role."""

    revision: Annotated[str, Field(max_length=64)] | None = None
    """Hash of what changes the engines' work; pods of one revision ferry KV to each other."""

    model_commit: Annotated[str, Field(max_length=128)] | None = None
    """The commit that the model's revision resolved to."""

    path: Literal["disaggregated", "aggregated"] | None = None
    """How prompts are computed: by prefill pods, or by the decode pods themselves."""

    url: Text | None = None
    """The endpoint inside the cluster; clients add `/chat/completions`."""
