"""Where a service's pods are, and what every way of finding them has in common."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from kvferry_wire.pod import Role

TERMINATING = "terminating, says Kubernetes"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as discovery names it. What it really is, it says itself (``/internal/v1/info``)."""

    name: str
    role: Role
    host: str
    http: int
    state: int
    uid: str = ""  # of the pod, on Kubernetes: another uid is another pod, whatever its name and address
    withheld: str = ""  # why discovery wants nothing new sent there; empty when it has nothing against it

    @property
    def ending(self) -> bool:
        """Whether the pod will end soon, says discovery."""
        return self.withheld == TERMINATING

    def url(self, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.http}{path}"

    def same_pod(self, other: "Endpoint") -> bool:
        """Whether both name one pod at one place; what is held against it may differ."""
        return msgspec.structs.replace(self, withheld=other.withheld) == other


Take = Callable[[tuple[Endpoint, ...]], None]


class Discovery(Protocol):
    """A way of finding a service's pods."""

    async def follow(self, take: Take) -> None:
        """Tell of all pods, at first and at each change, until cancelled."""

    def why_unknown(self) -> str:
        """Why the pods are not known yet; empty once they are."""

    def current(self) -> bool:
        """Whether what was told last is known to be up to date."""
