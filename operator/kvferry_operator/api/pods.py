"""Fields of a role that place, size and equip its pods. Named fields only: there is no free-form pod template."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvferry_operator.api.base import (
    ACCEPTS,
    DNS_LABEL,
    ENV_NAME,
    SECRET,
    Annotations,
    LabelKey,
    Labels,
    LabelValue,
    ManifestModel,
    ResourceMap,
    raise_broken,
)

RESERVED_LABEL_DOMAINS = ("app.kubernetes.io/", "serving.kvferry.dev/")


class Resources(ManifestModel):
    """What a pod asks of its node, as in a Kubernetes container."""

    requests: ResourceMap = Field(default_factory=dict)
    """What the scheduler keeps for the pod, by resource name: `cpu`, `memory`, `nvidia.com/gpu`."""

    limits: ResourceMap = Field(default_factory=dict)
    """What the pod may use at most, by resource name."""


class EnvVar(ManifestModel):
    """One environment variable of a role's processes."""

    name: Annotated[
        str,
        Field(
            pattern=ENV_NAME,
            max_length=256,
            json_schema_extra={ACCEPTS: "a variable's name: letters, digits and '_', not a digit first"},
        ),
    ]
    """The variable's name."""

    value: Annotated[
        str,
        Field(
            pattern=r"^[^\x00]*$",
            max_length=32768,
            json_schema_extra={SECRET: True, ACCEPTS: "a string of at most 32768 characters (quote numbers)"},
        ),
    ]
    """The variable's value, a string."""


class Toleration(ManifestModel):
    """A node taint that the pods tolerate, as in Kubernetes."""

    key: LabelKey | None = None
    """The taint's key; absent with `operator: Exists` tolerates every taint."""

    operator: Literal["Exists", "Equal"] = "Equal"
    """How the key's value is compared."""

    value: LabelValue | None = None
    """The taint's value, for `operator: Equal`."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; absent matches every effect."""

    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """For `effect: NoExecute`: seconds for which the pod stays."""

    @model_validator(mode="after")
    def _rules(self) -> "Toleration":
        if self.operator == "Exists" and self.value is not None:
            raise_broken([("value", "operator Exists takes no value")])
        if self.operator == "Equal" and self.key is None:
            raise_broken([("key", "missing; operator Equal needs a key")])
        return self


class TopologySpreadConstraint(ManifestModel):
    """How a role's pods spread over nodes or zones; the selector is the role's own pods."""

    topology_key: LabelKey
    """The node label whose values are the domains, such as `topology.kubernetes.io/zone`."""

    max_skew: Annotated[int, Field(ge=1, le=1000)] = 1
    """By how many pods two domains may differ."""

    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """What happens to a pod that would break the bound."""


SpreadConstraints = Annotated[list[TopologySpreadConstraint], Field(max_length=8)]
AffinityTerms = Annotated[
    dict[str, Any],
    Field(
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True, ACCEPTS: "a mapping as in a Kubernetes pod"}
    ),
]


class Affinity(ManifestModel):
    """Affinity as in a Kubernetes pod; the API server checks what is inside."""

    node_affinity: AffinityTerms | None = None
    """Which nodes the pods may or should run on."""

    pod_affinity: AffinityTerms | None = None
    """Which pods they should run beside."""

    pod_anti_affinity: AffinityTerms | None = None
    """Which pods they should keep away from."""


class PodSettings(ManifestModel):
    """What every role can say about its pods. On one machine (`kvferry up`) only `env` has a meaning."""

    image: (
        Annotated[
            str,
            Field(
                pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$",
                max_length=512,
                json_schema_extra={ACCEPTS: "an image reference such as registry/name:tag"},
            ),
        ]
        | None
    ) = None
    """The container image. Absent: the operator's own release."""

    resources: Resources = Resources()
    """What each pod asks of its node."""

    env: Annotated[list[EnvVar], Field(max_length=64)] = Field(default_factory=list)
    """Environment variables of each pod's processes; they win over those that the plan sets."""

    node_selector: Labels = Field(default_factory=dict)
    """Labels that a node must carry."""

    tolerations: Annotated[list[Toleration], Field(max_length=16)] = Field(default_factory=list)
    """Taints that the pods tolerate."""

    affinity: Affinity | None = None
    """Where the pods may or should run."""

    topology_spread_constraints: SpreadConstraints = Field(default_factory=list)
    """How the pods spread over nodes or zones."""

    priority_class_name: (
        Annotated[str, Field(pattern=DNS_LABEL, max_length=253, json_schema_extra={ACCEPTS: "a PriorityClass's name"})]
        | None
    ) = None
    """The PriorityClass of the pods."""

    labels: Labels = Field(default_factory=dict)
    """Labels added to each pod. The domains `app.kubernetes.io/` and `serving.kvferry.dev/` are the operator's own."""

    annotations: Annotations = Field(default_factory=dict)
    """Annotations added to each pod."""

    @model_validator(mode="after")
    def _pod_rules(self) -> "PodSettings":
        broken: list[tuple[str, str]] = []
        seen: set[str] = set()
        for index, variable in enumerate(self.env):
            if variable.name in seen:
                broken.append((f"env.{index}.name", f'"{variable.name}" is given twice'))
            seen.add(variable.name)
        reserved = [key for key in self.labels if key.startswith(RESERVED_LABEL_DOMAINS)]
        broken += [(f"labels.{key}", "labels of this domain are the operator's own") for key in reserved]
        raise_broken(broken)
        return self
