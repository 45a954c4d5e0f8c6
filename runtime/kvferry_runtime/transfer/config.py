"""What the transfer of one engine is given, and what it tells of itself."""

from dataclasses import dataclass, field

import msgspec

from kvferry_wire.hashing import CompatFields
from kvferry_wire.layout import LayoutDescriptor
from kvferry_wire.limits import DEFAULT_LIMITS, Limits


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine incarnation's transfer."""

    incarnation: bytes  # 16 random bytes, drawn at this start
    epoch: int
    compat_hash: str
    compat: CompatFields | None = None  # what the hash is of
    layout: LayoutDescriptor
    bind_host: str = "127.0.0.1"
    advertised_host: str = ""  # what handles name; the bind host if empty
    control_port: int = 0  # 0: any free port
    data_port: int = 0
    backends: tuple[str, ...] = ("tcp",)  # in order of preference
    checksums: bool = True  # on the handles that are granted here; those of others are checked wherever they have them
    limits: Limits = DEFAULT_LIMITS

    @property
    def host(self) -> str:
        """Where peers reach this engine."""
        return self.advertised_host or self.bind_host


class TransferPorts(msgspec.Struct, frozen=True, kw_only=True):
    """TCP ports that the transfer listens on."""

    control: int
    data: int


class TransferState(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of the transfer, for load, metrics and info. Counters count from the start of the service."""

    leases: int  # live: each keeps blocks
    leases_granted: int
    leases_ended: dict[str, int]  # by `LeaseEnded.why`
    holds: int  # legs whose lease is held and that have no blocks yet
    pulls: int  # legs with blocks that are not finished
    reads: int  # of them, those that the back end works on
    peers: int
    handshakes: int
    pulls_ok: int
    pulls_failed: dict[str, int]  # by `RecomputeReason`
    pulled_bytes: int  # of pulls that were valid
    pull_seconds: float  # of pulls that were valid, from blocks given to confirmed
    sent_bytes: int  # to readers, valid or not
    dropped_messages: int  # on the control port: malformed or oversized
    dropped_connections: int  # on the data port: not proved, malformed, stalled or over the cap
    backends: dict[str, str]  # name -> "ok", or why not


@dataclass(slots=True)
class PullCounters:
    """Counters of the reading side; written by its one thread, read by any."""

    ok: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0


class TransferError(RuntimeError):
    """The transfer cannot work, or has stopped working; the message says why."""
