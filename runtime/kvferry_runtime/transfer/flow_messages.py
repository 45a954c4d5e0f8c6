"""What goes into a transfer flow and what comes out. All times are the driver's, in seconds of a monotonic clock."""

from dataclasses import dataclass

from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import LeaseAnswer

# ---- in ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlocksGiven:
    """The engine has blocks for the KV: the flow owes a `Finished` from now on. `nbytes`: of the whole pull."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The handshake with the peer has succeeded (now, or earlier for another flow)."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The handshake has failed for good."""

    reason: RecomputeReason


@dataclass(frozen=True, slots=True)
class Answered:
    """The peer answered the message with this id. Late, repeated and foreign answers are welcome and ignored."""

    message_id: int
    answer: LeaseAnswer


@dataclass(frozen=True, slots=True)
class ReadStarted:
    """The back end has begun: bytes may be written into the blocks from now on."""


@dataclass(frozen=True, slots=True)
class BytesArrived:
    """So many bytes of the pull are there."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class ReleaseSent:
    """The back end has sent the release behind its last request. Told before any answer that came after it."""


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The last byte has arrived; the back end writes no more.

    `answer`: to the release with the id of `Read`, if the back end has sent it and knows.
    """

    answer: LeaseAnswer | None = None


@dataclass(frozen=True, slots=True)
class ReadStopped:
    """The back end has ended without all bytes, by itself or as asked, and writes no more."""

    reason: RecomputeReason = RecomputeReason.READ_ERROR


@dataclass(frozen=True, slots=True)
class Drop:
    """The engine needs the KV no more. `reason` is told to the peer."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


FlowEvent = (
    BlocksGiven
    | Welcomed
    | Refused
    | Answered
    | ReadStarted
    | BytesArrived
    | ReleaseSent
    | ReadDone
    | ReadStopped
    | Drop
    | Tick
)

# ---- out ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handshake:
    """See that the peer is asked `Hello` once, and tell this flow `Welcomed` or `Refused`."""


@dataclass(frozen=True, slots=True)
class SendRenew:
    message_id: int


@dataclass(frozen=True, slots=True)
class SendRelease:
    message_id: int


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Best effort: sent once, no answer is waited for."""

    message_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Read:
    """Read all blocks as soon as a place is free; then `ReadStarted` and in the end `ReadDone` or `ReadStopped`.

    `release_id`: for a back end that sends the release itself, behind its last request.
    """

    release_id: int


@dataclass(frozen=True, slots=True)
class StopRead:
    """Make the read end soon; `ReadStopped` or `ReadDone` still follows."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing writes into the blocks any more. They are valid if `reason` is ``None``.

    `seconds`: since the blocks were given; `nbytes`: that arrived.
    """

    reason: RecomputeReason | None
    seconds: float
    nbytes: int


FlowEffect = Handshake | SendRenew | SendRelease | SendFailed | Read | StopRead | Finished
