"""A leg: one attempt at a request on one pod. ``POST /internal/v1/{prefill,generate}`` take it as msgpack."""

from typing import Literal

import msgspec

from kvferry_wire.canonical import KeyExtras
from kvferry_wire.handle import KVHandle


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are picked and when an answer ends. Validated before it gets here."""

    seed: int  # 0..2**63-1; drawn by the router when the client gave none. Choice i uses seed + i (mod 2**63)
    max_tokens: int  # per choice, at least 1, counts the emitted ones
    min_tokens: int = 0  # before this many tokens no end-of-sequence or stop token is picked, and stop strings wait
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class ChoiceState(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice of the answer has given already; all zero on a first leg."""

    emitted: tuple[int, ...] = ()  # ids picked so far: input from now on, never picked again
    chars_sent: int = 0  # characters of its text that the client has


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the decode pod writes the answer for the client."""

    kind: Literal["chat", "completion"]
    stream: bool
    include_usage: bool
    response_id: str
    created: int  # seconds since the Unix epoch, as the client sees it; compared with nothing
    model: str  # the name the client asked for
    role_sent: bool = False  # a resumed chat stream does not repeat the role chunk


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a request on one pod. Its ``repr`` shows no token."""

    internal_id: str  # unique in the service, made by the router
    attempt: int  # counts all legs of one request, from 0, so that no two of them share a name
    request_id: str  # the client's x-request-id, for logs only
    deadline_ms: int  # time remaining; never a clock reading
    prompt_ids: tuple[int, ...]
    choices: tuple[ChoiceState, ...]  # length n
    sampling: Sampling
    format: AnswerFormat
    extras: KeyExtras
    cached_tokens: int = 0  # of the first prefill, for usage
    handle: KVHandle | None = None
    must_pull: bool = False  # a handle whose KV cannot be had ends the leg (`Fail` of kind `transfer`)
    recompute: str = ""  # why the prefill pod was not asked or failed: shown in the final path and counted
    resumed: str = ""  # how earlier decode legs of this answer were lost; a stream tells it in a comment
    compat_hash: str = ""  # of the pods that this answer may be computed on; another one refuses the leg
    attached: bool = False  # a lease that it ends in goes with its connection, until a reader takes it up

    def __repr__(self) -> str:
        return (
            f"Leg({self.internal_id}#{self.attempt}, prompt={len(self.prompt_ids)}, n={len(self.choices)}, "
            f"handle={self.handle is not None})"
        )


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Names a leg. ``POST /internal/v1/abort``: idempotent; leaves a tombstone that stops a leg arriving later.

    ``POST /internal/v1/handoff``: another pod will go on with it; its stream ends with ``Handoff``, or with ``Fail`` of
    kind ``draining`` where it has no KV. Idempotent; 404 when it does not run there.
    """

    internal_id: str
    attempt: int
