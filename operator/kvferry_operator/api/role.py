"""``InferenceServiceRole``: the number of pods of one role, with a /scale of its own for `kubectl scale`, HPA and KEDA.

The operator makes one per role of a service and reads ``replicas`` from it; it writes ``replicas`` only when the
number in the service's manifest changes.
"""

from typing import Annotated, Literal

from pydantic import Field

from kvferry_operator.api.base import DnsName, ManifestModel
from kvferry_operator.api.status import Count, Generation

ROLE_KIND = "InferenceServiceRole"
RoleName = Literal["prefill", "decode", "router"]


class RoleSpec(ManifestModel):
    """What is asked for."""

    service: DnsName
    """The InferenceService, of the same namespace. Cannot be changed."""

    role: RoleName
    """The role. Cannot be changed."""

    replicas: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of pods. Who writes it last has it: `kubectl scale`, an autoscaler, or a new number in the manifest."""


class RoleObjectStatus(ManifestModel):
    """What is."""

    replicas: Count | None = None
    """Pods that exist."""

    ready_replicas: Count | None = None
    """Pods that would answer a request now."""

    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the role's pods, for autoscalers."""

    observed_generation: Generation | None = None
    """The generation of the spec that this status was made for."""


class InferenceServiceRole(ManifestModel):
    """The number of pods of one role of an InferenceService."""

    spec: RoleSpec
    """What is asked for."""

    status: RoleObjectStatus | None = None
    """What is. Written by the operator."""
