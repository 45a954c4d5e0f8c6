"""What goes into the engine's decision core and what comes out: the engine's inbox and its effects.

The core takes ``EngineInput`` values and the time, and returns ``EngineEffect`` values; shells around it move them.
Submissions come from the API server and outputs return to it (over ZMQ, as msgpack). Lease and pull messages stay in
the process, between the core and the transfer threads.
"""

from typing import Literal

import msgspec

from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import FailKind
from kvferry_wire.handle import KVHandle
from kvferry_wire.leg import Sampling


class LegKey(msgspec.Struct, frozen=True, array_like=True):
    """Names one leg in one engine."""

    internal_id: str
    attempt: int


# ---- in: from the API server -------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A leg without what only text needs. Its ``repr`` shows no token."""

    key: LegKey
    kind: Literal["prefill", "generate"]
    prompt_ids: tuple[int, ...]
    emitted: tuple[tuple[int, ...], ...]  # per choice; its length is n
    sampling: Sampling
    extras: KeyExtras
    deadline_s: float  # time remaining
    eos_token_ids: tuple[int, ...]
    handle: KVHandle | None = None  # checked (MAC and digest) by the shell before the core sees it
    recompute: str = ""  # why a handle was dropped before this, for `TokensOut.recomputed`
    must_pull: bool = False  # a handle whose KV cannot be had ends the leg

    def ferriable_ids(self) -> tuple[int, ...]:
        """The ids that ferried KV may be of: with one choice also what it has emitted, but for the last one."""
        return self.prompt_ids + self.emitted[0][:-1] if len(self.emitted) == 1 else self.prompt_ids

    def __repr__(self) -> str:
        return f"Submit({self.key}, {self.kind}, prompt={len(self.prompt_ids)}, n={len(self.emitted)})"


class AbortLeg(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Idempotent; unknown keys are ignored. Nothing more comes out for the leg."""

    key: LegKey


class StopChoice(msgspec.Struct, frozen=True, kw_only=True, tag="stop_choice"):
    """The server found a stop string: the choice has ended for it, what the engine still makes is dropped."""

    key: LegKey
    choice: int


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Take nothing new."""


class HandOver(msgspec.Struct, frozen=True, kw_only=True, tag="hand_over"):
    """Another engine will go on with this leg: end it, with its KV under a lease. Idempotent; unknown keys are ignored.

    Exactly one of these follows: ``HandedOver``, ``FailOut`` of kind ``draining`` (it has no KV worth a transfer), or
    the leg's own end.
    """

    key: LegKey


# ---- in: from the transfer threads -------------------------------------------------------------------------------


class PullFinished(msgspec.Struct, frozen=True, kw_only=True, tag="pull_finished"):
    """The transfer will write no more into the blocks of this pull. ``reason`` is empty when the blocks are valid."""

    key: LegKey
    reason: str = ""  # else a label of `transfer.flow.RecomputeReason`
    seconds: float = 0.0
    nbytes: int = 0


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="lease_ended"):
    """The lease table has ended the lease: drop its references."""

    lease_id: int
    why: Literal["released", "failed", "expired", "withdrawn"]


class LeaseTaken(msgspec.Struct, frozen=True, kw_only=True):
    """A reader has been heard that renews the lease: it is no more up to whoever got the handle. Once per lease.

    For the loop, which says `LeaseSettled`; the core does not need it.
    """

    lease_id: int


Posted = PullFinished | LeaseTaken | LeaseEnded
"""What the transfer's threads put into the loop's inbox."""

ServerInput = Submit | AbortLeg | StopChoice | Drain | HandOver
EngineInput = Submit | AbortLeg | StopChoice | Drain | HandOver | PullFinished | LeaseEnded


# ---- out: to the API server --------------------------------------------------------------------------------------

Finish = Literal["stop", "length"]


class TokensOut(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Newly picked ids of one choice; ``finish`` when they end it."""

    key: LegKey
    choice: int
    ids: tuple[int, ...]
    finish: Finish | None = None
    stop_token: int | None = None  # the user's `stop_token_ids` entry that ended it; None for end-of-sequence
    cached_tokens: int = 0  # prompt tokens that were not computed for this leg
    recomputed: str = ""  # why ferried KV was not used


class PrefilledOut(msgspec.Struct, frozen=True, kw_only=True, tag="prefilled"):
    """First tokens, and the handle to the leased KV (none if every choice ended with its first token).

    The core leaves ``handle`` empty; the shell puts in the one that it made of the ``GrantLease`` just before it.
    """

    key: LegKey
    first: tuple[int, ...]
    cached_tokens: int
    handle: KVHandle | None = None


class HandedOver(msgspec.Struct, frozen=True, kw_only=True, tag="handed_over"):
    """The leg ended here and may go on elsewhere, with the KV of the handle. Nothing more comes out for it.

    The core leaves ``handle`` empty, as that of ``PrefilledOut``.
    """

    key: LegKey
    handle: KVHandle | None = None


class FailOut(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """The leg ended without an answer."""

    key: LegKey
    kind: FailKind
    message: str
    reason: str = ""  # of kind `transfer`: a label of `transfer.reasons`


class LeaseSettled(msgspec.Struct, frozen=True, kw_only=True, tag="lease_settled"):
    """The lease that the leg's answer named was taken up by a reader, or has ended."""

    key: LegKey


EngineOutput = TokensOut | PrefilledOut | HandedOver | FailOut | LeaseSettled


# ---- out: to the transfer threads --------------------------------------------------------------------------------


class GrantLease(msgspec.Struct, frozen=True, kw_only=True):
    """The core took one reference on each of these blocks for the lease, and drops them at ``LeaseEnded``.

    Handed to the lease table before ``PrefilledOut`` or ``HandedOver`` leaves the process. ``prompt_digest`` is over
    the ids of all ``token_count`` positions.
    """

    key: LegKey
    lease_id: int
    epoch: int
    prompt_digest: bytes
    blocks: tuple[tuple[int, ...], ...]  # per KV group, in the order of the prompt
    token_count: int


class StartPull(msgspec.Struct, frozen=True, kw_only=True):
    """Fill these blocks from the handle's. The transfer owns them until ``PullFinished``."""

    key: LegKey
    handle: KVHandle
    blocks: tuple[tuple[int, ...], ...]  # per KV group; as many as the handle's block_count
    deadline_s: float  # time remaining of the leg


class HoldLease(msgspec.Struct, frozen=True, kw_only=True):
    """A leg with a handle was accepted: renew its lease from now on, also while it waits for blocks."""

    key: LegKey
    handle: KVHandle
    deadline_s: float


class DropLease(msgspec.Struct, frozen=True, kw_only=True):
    """The leg needs no KV any more: cancel its pull, if any (``PullFinished`` still follows), and tell the owner."""

    key: LegKey
    reason: str


EngineEffect = EngineOutput | GrantLease | StartPull | HoldLease | DropLease
