"""What goes into a request's flow and what comes out: events and effects, all frozen."""

from dataclasses import dataclass
from typing import Literal

from kvferry_wire.frames import Frame
from kvferry_wire.leg import Leg

Kind = Literal["prefill", "decode"]
Path = Literal["disaggregated", "aggregated", "recomputed"]

# Why no further pod was tried for a request that failed.
GaveUp = Literal[
    "no_pod",  # none was left, in time
    "barren",  # several pods in a row were lost without a token: the request may be what ends them
    "losses",  # too many legs were lost
    "protocol",  # what the client has may be wrong
    "memory",  # too many ids to keep
    "transfer",  # its KV could not be ferried, and the service asks for nothing else
]

# How a leg's connection ended without the flow having asked for it.
CloseCause = Literal[
    "ended",  # the stream closed in order
    "cut",  # it broke off, or closed inside a frame
    "refused",  # no connection, or none in time
    "garbage",  # bytes that are no frame, or more of them than a frame may have
    "busy",  # an HTTP status in place of a stream: 429
    "draining",  # 503
    "invalid",  # 400, 413, 422
    "failed",  # any other
]

# What is done when a prompt's KV cannot be ferried: decode computes it, another prefill pod is tried before that, or
# the request fails.
FailurePolicy = Literal["recompute", "retry", "fail"]

Outcome = Literal[
    "ok", "invalid", "busy", "unavailable", "deadline", "failed", "cancelled", "client_stalled", "stopping"
]


# ---- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The pods that selection chose; no prefill pod means that decode does the whole job.

    ``compat_hash`` is theirs: the answer is never computed on pods of another one.
    """

    prefill: str | None
    decode: str
    compat_hash: str = ""


@dataclass(frozen=True, slots=True)
class PodChosen:
    """The answer to ``NeedPod``; ``None`` when no other pod can take the leg.

    ``prefill``: with a decode pod, that this one computes the prompt for it.
    """

    kind: Kind
    pod: str | None
    prefill: str | None = None


@dataclass(frozen=True, slots=True)
class LegFrames:
    """Whole frames of a leg, in order."""

    attempt: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class LegClosed:
    """The leg's stream is over. ``message`` and ``param`` come with ``invalid`` and are fit for the client."""

    attempt: int
    cause: CloseCause
    message: str = ""
    param: str | None = None


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client has left, or (``stalled``) takes no bytes any more."""

    stalled: bool = False


@dataclass(frozen=True, slots=True)
class Stopping:
    """The router stops and waits no longer."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due at ``RequestFlow.next_wakeup`` at the latest."""


Event = Start | PodChosen | LegFrames | LegClosed | ClientGone | Stopping | Tick


# ---- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Book:
    """Count the request on this pod; always before the leg that it is for is opened. ``computes``: also its prompt."""

    kind: Kind
    pod: str
    computes: bool


@dataclass(frozen=True, slots=True)
class Computed:
    """The prompt of the booked leg is computed: its prefill work no longer counts, its place still does."""

    kind: Kind
    pod: str


@dataclass(frozen=True, slots=True)
class Release:
    """Take the booking back. Comes exactly once for each ``Book``."""

    kind: Kind
    pod: str


@dataclass(frozen=True, slots=True)
class NeedPod:
    """Select another pod, none of ``excluded`` and of this ``compat_hash``, and answer with ``PodChosen``.

    ``beside``: the other pod of its pair, decode for prefill and the other way round.
    ``ferried``: the prompt's KV waits for it at a prefill pod. ``resume``: it goes on with an answer, which counts
    against the router's resumes; if nothing is ferried, a prefill pod may be chosen with a decode pod.
    """

    kind: Kind
    excluded: frozenset[str]
    compat_hash: str = ""
    beside: str | None = None
    ferried: bool = False
    resume: bool = False


@dataclass(frozen=True, slots=True)
class OpenLeg:
    kind: Kind
    pod: str
    leg: Leg


@dataclass(frozen=True, slots=True)
class FinishLeg:
    """The leg has said all, be it a failure: let its stream close by itself, so that the pod sees it delivered.

    The lease that it may have ended in goes with that stream, until a reader has taken it up.
    """

    attempt: int


@dataclass(frozen=True, slots=True)
class AbortLeg:
    """Close the leg's connection now and abort it by name. Also withdraws the lease of a prefill leg that has ended."""

    attempt: int
    pod: str


@dataclass(frozen=True, slots=True)
class PodFailed:
    """A leg ended in a way that a healthy pod's does not; counted, and a hint to look at the pod."""

    pod: str
    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class Ferried:
    """Decode has the prompt's KV from this prefill pod, or (``reason``) could not get it."""

    prefill: str
    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """Another leg goes on with the answer: how the one before was lost, and for how long nothing came."""

    cause: str
    gap_s: float


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes for the client of a stream: whole SSE events. The first one starts the answer, whose path is ``path``."""

    data: bytes
    path: Path
    tokens: int  # newly picked ones among them


@dataclass(frozen=True, slots=True)
class FinishAnswer:
    """The right end. ``data`` is the last of a stream, or the whole body when the answer is not streamed."""

    data: bytes
    path: Path
    stream: bool


@dataclass(frozen=True, slots=True)
class FailAnswer:
    """The answer ends in an error. ``in_band``: bytes were sent, so the error is an event and the stream is cut."""

    failure: "Failure"
    in_band: bool


@dataclass(frozen=True, slots=True)
class Record:
    """The one outcome of the request, for the log line and the metrics. Times are those given with the events."""

    outcome: Outcome
    path: Path
    prefill_pod: str | None
    decode_pod: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    recomputed: str
    accepted_at: float
    first_token_at: float | None
    ended_at: float
    legs: int
    resumed: tuple[str, ...] = ()  # how decode legs that had begun the answer were lost
    gave_up: GaveUp | None = None


Effect = (
    Book
    | Computed
    | Release
    | NeedPod
    | OpenLeg
    | FinishLeg
    | AbortLeg
    | PodFailed
    | Ferried
    | Resumed
    | Send
    | FinishAnswer
    | FailAnswer
    | Record
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error for the client, before it is written as JSON or as an event."""

    status: int
    message: str
    type: str
    code: str | None
    outcome: Outcome
    param: str | None = None
    retry_after_s: int | None = None
