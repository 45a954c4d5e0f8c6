"""What selection knows of a request and of each pod: values, taken at one moment."""

from dataclasses import dataclass

from kvferry_router.bookings import PodBookings
from kvferry_wire.pod import Role
from kvferry_wire.state import Load


@dataclass(frozen=True, slots=True)
class Ask:
    """The request, as far as routing cares."""

    internal_id: str
    prompt_tokens: int
    answer_tokens: int  # that each choice may have: the decode pod's context holds them beside the prompt
    growth_tokens: int  # tokens that the answer is expected to add, over all choices
    text_digest: str  # of the bundle that the prompt was tokenized with
    excluded: frozenset[str] = frozenset()  # pods that failed on this request
    compat_hash: str = ""  # of the pods that began the answer; empty while none has
    barred: frozenset[tuple[str, str]] = frozenset()  # (prefill, decode): transfers between them fail


@dataclass(frozen=True, slots=True)
class Candidate:
    """One pod. ``load`` is ``None`` where nothing recent is known: a neutral value is used, the pod is not out."""

    name: str
    role: Role
    compat_hash: str
    text_digest: str
    block_size: int
    total_blocks: int
    max_running: int
    max_model_len: int
    kv_bytes_per_token: int
    ready: bool
    draining: bool
    cached_blocks: int  # leading blocks of the prompt in its prefix cache
    load: Load | None
    bookings: PodBookings

    def serves(self, kind: str) -> bool:
        return self.role in (kind, "both")

    def cached_tokens(self, ask: Ask) -> int:
        """Prompt tokens it need not compute; the last one is always computed."""
        return max(0, min(self.cached_blocks * self.block_size, ask.prompt_tokens - 1))

    def queued_tokens(self) -> int:
        """Prompt tokens before this request: its own report lags, our bookings miss other routers'."""
        reported = 0 if self.load is None else self.load.queued_tokens
        return max(reported, self.bookings.prefill_tokens)

    def active(self) -> int:
        """Sequences running or waiting."""
        reported = 0 if self.load is None else self.load.running + self.load.waiting
        return max(reported, self.bookings.legs)

    def blocks_needed(self, ask: Ask) -> int:
        return -(-(ask.prompt_tokens + ask.growth_tokens) // self.block_size)

    def free_blocks(self) -> int:
        """Blocks that nobody holds. Unknown load counts as an empty pod with our own bookings."""
        free = self.total_blocks if self.load is None else self.load.free_blocks
        return min(free, self.total_blocks - self.bookings.decode_blocks)
