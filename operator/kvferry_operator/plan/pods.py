"""Types of the plan. Frozen, comparable, without clocks, paths of a machine, or free ports."""

import enum
from collections.abc import Mapping
from typing import Literal

import msgspec

from kvferry_operator.api.source import ModelSource

PlannedRole = Literal["prefill", "decode", "router"]
PortName = Literal["http", "control", "data", "state"]


class Slot(enum.Enum):
    """A place in a command line that a rendering fills: what it means differs between a node and a laptop."""

    HOST = "host"  # the address to bind
    HTTP_PORT = "http"
    CONTROL_PORT = "control"
    DATA_PORT = "data"
    STATE_PORT = "state"
    KEYS_DIR = "keys-dir"  # the folder with the pod's key files
    MODEL = "model"  # the model as a local folder or file, or the toy's name
    PODS_FILE = "pods-file"  # the router's local discovery
    API_KEYS_FILE = "api-keys-file"


Argument = str | Slot


class PortPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One port of a pod."""

    name: PortName
    slot: Slot
    cluster_port: int  # on Kubernetes, where each pod has an address of its own
    local_port: int | None = None  # on one machine; None takes a free one


class Probes(msgspec.Struct, frozen=True, kw_only=True):
    """How to see whether a pod lives, would answer, and should be sent clients: GET on its http port, status 200."""

    live: str = "/healthz"
    ready: str = "/readyz"
    traffic: str = "/readyz"


class PodPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One pod."""

    name: str  # within the service: decode-0
    role: PlannedRole
    module: str  # run as `python -m module`
    argv: tuple[Argument, ...]
    env: tuple[tuple[str, str], ...]  # sorted by name
    ports: tuple[PortPlan, ...]
    probes: Probes = Probes()
    requests: tuple[tuple[str, str], ...] = ()  # resource name, quantity
    limits: tuple[tuple[str, str], ...] = ()
    image: str | None = None
    keys: tuple[str, ...]  # names of the service keys that it may hold
    threads: int | None = None  # compute threads; None for a pod that does not compute

    def rendered(self, values: Mapping[Slot, str]) -> list[str]:
        """The arguments with their slots filled. Raises ``KeyError`` for a slot without a value."""
        return [argument if isinstance(argument, str) else values[argument] for argument in self.argv]


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that runs for one manifest. Engines come first, the router last."""

    name: str
    model_name: str
    source: ModelSource
    s3_endpoint: str | None = None  # of an s3 source, as the manifest gives it
    s3_region: str | None = None
    revision: str
    pods: tuple[PodPlan, ...]
    templates: tuple[PodPlan, ...]  # one pod of each role that the manifest names, also of one with no pods now
    port: int  # of the endpoint
    auth: Literal["none", "apiKeys"]
    api_keys_file: str | None  # as the manifest gives it
    notes: tuple[str, ...]  # what was chosen and why, one sentence each

    def of_role(self, role: PlannedRole) -> tuple[PodPlan, ...]:
        """The pods of one role, in order."""
        return tuple(pod for pod in self.pods if pod.role == role)


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan takes from the world."""

    cores: int | None = None  # that the engines of this plan share; None where each pod has cores of its own
