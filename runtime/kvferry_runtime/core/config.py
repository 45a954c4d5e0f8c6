"""What the decision core is told at its start; nothing in it changes afterwards."""

import math

import msgspec

from kvferry_wire.limits import DEFAULT_LIMITS, Limits


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, policy and keys of one engine. Its ``repr`` shows no key.

    Raises ``ValueError`` that lists every bad field together.
    """

    block_size: int  # token slots of a KV block
    blocks: int  # of the KV memory, the null block included; one more than may be used
    token_budget: int  # input tokens that one step computes at most, prefill and decode alike
    max_running: int  # sequences in the running batch
    max_model_len: int  # tokens of a sequence, prompt and answer together
    hash_key: bytes  # the service's `hash` key: block hashes
    kv_key: bytes  # the service's `kv` key: prompt digests
    epoch: int = 1
    limits: Limits = DEFAULT_LIMITS
    prefix_caching: bool = True
    watermark: float = 0.01  # of the usable blocks: left free when a sequence joins others, at least one block
    vocab_size: int | None = None  # ids outside it are refused; None leaves that check to the caller

    def __post_init__(self) -> None:
        faults = [
            f"{name}: {getattr(self, name)} given, at least {least} is accepted"
            for name, least in (
                ("block_size", 1),
                ("blocks", 2),
                ("token_budget", 1),
                ("max_running", 1),
                ("max_model_len", 2),
            )
            if getattr(self, name) < least
        ]
        if not 0 <= self.watermark < 1:
            faults.append(f"watermark: {self.watermark} given, 0 <= watermark < 1 is accepted")
        if not faults and self.max_model_len > self.capacity:
            faults.append(
                f"max_model_len: {self.max_model_len} given, but {self.usable_blocks} blocks of {self.block_size} "
                f"tokens hold one sequence of at most {self.capacity} tokens"
            )
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def usable_blocks(self) -> int:
        """Blocks that sequences can own: all but block 0."""
        return self.blocks - 1

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        return self.usable_blocks * self.block_size

    @property
    def watermark_blocks(self) -> int:
        """Blocks left free when a sequence joins others."""
        return max(1, math.ceil(self.usable_blocks * self.watermark))

    @property
    def lease_blocks(self) -> int:
        """References on blocks that all leases together may hold."""
        return int(self.usable_blocks * self.limits.lease_share)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the K and V of so many tokens."""
        return -(-tokens // self.block_size)

    def __repr__(self) -> str:
        return (
            f"CoreConfig(block_size={self.block_size}, blocks={self.blocks}, token_budget={self.token_budget}, "
            f"max_running={self.max_running}, max_model_len={self.max_model_len}, epoch={self.epoch})"
        )
