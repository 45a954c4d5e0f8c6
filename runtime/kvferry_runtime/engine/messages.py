"""What crosses between the API server and its EngineCore process, as msgpack over one socket (``message_socket``).

Down: ``Downward``. Up: ``Upward``; a step's outputs travel together in one ``Batch``. The engine inherits its end of
the socket, which has no name. ``EngineConfig`` goes down first, on the process's standard input, so that no key is
ever in an argument, in the environment or in a file of ours.
"""

import msgspec

from kvferry_runtime.core.messages import AbortLeg, Drain, EngineOutput, HandOver, StopChoice, Submit
from kvferry_wire.keys import ServiceKeys
from kvferry_wire.layout import LayoutDescriptor
from kvferry_wire.limits import DEFAULT_LIMITS, Limits
from kvferry_wire.state import Load


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an EngineCore process is told at its start. Its ``repr`` shows no key."""

    model: str  # a folder, a .gguf file, or toy[:...]
    model_digest: str  # over config, tokenizer and weights index
    dtype: str = "auto"
    attention: str = "auto"
    threads: int  # of compute, at least 1
    block_size: int = 16
    kv_blocks: int = 0  # usable blocks; 0: by kv_memory
    kv_memory: int = 0  # bytes; 0: chosen from the model and the machine's memory
    max_model_len: int = 0  # 0: the model's own, or what the KV memory holds if that is less
    max_running: int = 64
    token_budget: int = 0  # 0: what a step of half a second computes
    prefix_caching: bool = True
    checksums: bool = True  # of blocks that are leased out
    host: str = "127.0.0.1"
    advertised_host: str = ""
    control_port: int = 0  # these three: 0 takes a free one; without keys none is opened
    data_port: int = 0
    state_port: int = 0
    keys: ServiceKeys | None = None
    limits: Limits = DEFAULT_LIMITS
    log_json: bool | None = None
    log_level: str = "INFO"


# ---- down --------------------------------------------------------------------------------------------------------


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot_request"):
    """Asks for a ``SnapshotReply`` with the same number."""

    number: int


class PrefillAnswered(msgspec.Struct, frozen=True, kw_only=True, tag="prefill_answered"):
    """The answer (`Prefilled` or `Handoff`) that names this lease was written, or could not be."""

    lease_id: int
    delivered: bool


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """Unpublish all cached blocks."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End in order."""


Downward = (
    Submit | AbortLeg | StopChoice | Drain | HandOver | SnapshotRequest | PrefillAnswered | ResetPrefixCache | Stop
)


# ---- up ----------------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine would compute now, and this is what it is."""

    incarnation: bytes
    epoch: int
    dtype: str
    threads: int
    block_size: int
    total_blocks: int  # usable ones
    kv_bytes: int
    max_model_len: int
    token_budget: int
    layout: LayoutDescriptor
    compat_hash: str
    control_port: int  # these three: 0 where nothing listens
    data_port: int
    state_port: int
    transfer_backends: dict[str, str]  # name -> "ok", or why not
    attention_backends: dict[str, str]
    reasons: tuple[str, ...]  # why dtype, KV blocks, context length and back ends are what they are
    load_s: float  # from the process's start to now


class NotStarted(msgspec.Struct, frozen=True, kw_only=True, tag="not_started"):
    """Instead of ``Ready``: the engine cannot start as it was configured. Trying again is of no use."""

    message: str
    port_taken: bool = False  # with other ports it could


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Since the engine's start; counters never go down within an incarnation."""

    steps: int = 0
    step_tokens: int = 0  # input tokens of all steps
    step_seconds: float = 0.0  # model runner time
    preemptions: int = 0
    kv_events: int = 0
    state_dropped: int = 0  # messages that the state socket did not take
    pulls: int = 0  # a gauge: in flight now
    pulls_ok: int = 0
    pulls_failed: dict[str, int] = {}  # by reason
    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    sent_bytes: int = 0
    peers: int = 0  # a gauge
    leases_granted: int = 0
    leases_ended: dict[str, int] = {}  # by `LeaseEnded.why`


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """At least each ``HEARTBEAT_S`` while the loop turns; ``ticks`` counts steps and idle ticks."""

    ticks: int
    load: Load
    stats: EngineStats


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """All outputs of one turn of the loop, in order."""

    ticks: int
    outputs: tuple[EngineOutput, ...]


class SnapshotReply(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    number: int
    snapshot: bytes  # msgpack of kvferry_wire.state.Snapshot


Upward = Ready | NotStarted | Heartbeat | Batch | SnapshotReply

HEARTBEAT_S = 0.5

encode = msgspec.msgpack.Encoder().encode
decode_config = msgspec.msgpack.Decoder(EngineConfig).decode
decode_down = msgspec.msgpack.Decoder(Downward).decode
decode_up = msgspec.msgpack.Decoder(Upward).decode
