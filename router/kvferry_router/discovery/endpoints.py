"""Where a service's pods are."""

import msgspec

from kvferry_wire.pod import Role


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as discovery names it. What it really is, it says itself (``/internal/v1/info``)."""

    name: str
    role: Role
    host: str
    http: int
    state: int

    def url(self, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.http}{path}"

    def state_address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.state}"
