"""The toy model: exact integer arithmetic over real KV blocks, so that any wrong block gives a wrong token.

For the token ``t`` at position ``p`` of a sequence the model writes into the token's KV slot

    K = d(p) + e * STEP,  V = ~K        (64-bit wrap-around; e counts the slot's elements: layer, head, dim)
    d(p) = mix(d(p - 1) xor t * A xor p * B),  d(-1) = a constant

where ``d(p - 1)`` is read back through the block table. The next token is picked from

    s(p) = sum over i <= p, e of  w(i) * (u(e) * K(i, e) + u'(e) * V(i, e))

which reads every slot of the context through the block table. A missing, stale, foreign, misplaced or half-written
block therefore changes the next token. ``toy_next_tokens`` computes the same from token ids alone: the oracle.

Scores: four distinct candidates with scores 8, 7, 6 and 5; all other tokens have -100. Greedy picks the first; at
temperatures up to 2 no other token than the four can win against Gumbel noise, and the gaps are exact in float32.
"""

import time

import torch
from torch import Tensor

from kvferry_runtime.attention.backend import AttentionBatch
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.toy_oracle import (
    CANDIDATE_SCORES,
    MASK,
    OTHER_SCORE,
    ROOT,
    STEP,
    candidates_of,
    digest_of,
    element_weights,
    position_weight,
    toy_next_tokens,
)
from kvferry_runtime.model.toy_spec import ToySpec
from kvferry_wire.layout import KVGroup

__all__ = ["ToyModel", "ToySpec", "toy_next_tokens"]


def _signed(value: int) -> int:
    """The int64 with the same bits as the low 64 of ``value``."""
    value &= MASK
    return value - 2**64 if value >= 2**63 else value


class ToyModel:
    """The toy model behind the ``Model`` interface. ``forward`` returns int64 [T, 1]: s(p) of each token."""

    def __init__(self, spec: ToySpec) -> None:
        self.spec = spec
        self.config: ModelConfig = spec.model_config()
        elements = range(spec.elements)
        weights = element_weights(spec.elements)
        shape = (spec.layers, spec.heads, spec.dim)
        self._offsets = torch.tensor([_signed(e * STEP) for e in elements]).view(shape)
        # [layers, K|V, heads, dim], as a slot's elements lie in memory.
        self._weights = torch.stack(
            [torch.tensor([_signed(pair[side]) for pair in weights]).view(shape) for side in (0, 1)], dim=1
        )
        self._position_weights = torch.tensor([_signed(position_weight(p)) for p in range(spec.ctx)])

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """One int64 group."""
        return (
            KVGroup(
                name="full", layers=self.spec.layers, kv_heads=self.spec.heads, head_dim=self.spec.dim, dtype="int64"
            ),
        )

    def forward(self, token_ids: Tensor, positions: Tensor, kv: KVMemory, batch: AttentionBatch) -> Tensor:
        """See ``Model.forward``; sleeps ``step_ms`` first."""
        if self.spec.step_ms:
            time.sleep(self.spec.step_ms / 1000)
        memory = kv.tensor(0)
        if batch.open_blocks.numel():
            kv.clear_blocks(batch.open_blocks)
        states = torch.empty((token_ids.numel(), 1), dtype=torch.int64)
        starts = batch.query_starts.tolist()
        for row, context in enumerate(batch.context_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            table = batch.block_tables[row]
            self._write(memory, token_ids[begin:end], positions[begin:end], table, batch.slots[begin:end])
            sums = torch.cumsum(self._read(memory, table, context), 0)
            states[begin:end, 0] = sums[context - (end - begin) :]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Model.logits``."""
        scores = torch.full((hidden.shape[0], self.spec.vocab), OTHER_SCORE)
        for row, state in enumerate(hidden[:, 0].tolist()):
            scores[row, list(candidates_of(state & MASK, self.spec))] = torch.tensor(CANDIDATE_SCORES)
        return scores

    def _write(self, memory: Tensor, tokens: Tensor, positions: Tensor, table: Tensor, slots: Tensor) -> None:
        """Compute the digests of a row's tokens from the one before them in KV, and write them at their slots."""
        block_size = memory.shape[4]
        first = int(positions[0])
        previous = ROOT
        if first:
            block = int(table[(first - 1) // block_size])
            previous = int(memory[block, 0, 0, 0, (first - 1) % block_size, 0]) & MASK
        digests: list[int] = []
        for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
            previous = digest_of(token, position, previous)
            digests.append(_signed(previous))
        keys = torch.tensor(digests).view(-1, 1, 1, 1) + self._offsets  # [tokens, layers, heads, dim]
        memory[slots // block_size, :, 0, :, slots % block_size] = keys
        memory[slots // block_size, :, 1, :, slots % block_size] = ~keys

    def _read(self, memory: Tensor, table: Tensor, context: int) -> Tensor:
        """Each position's term of s, read through the block table: int64 [context]."""
        blocks = memory[table[: -(-context // memory.shape[4])]]  # [n, layers, K|V, heads, slots, dim]
        weighted = blocks * self._weights.unsqueeze(-2)
        terms = weighted.sum(dim=(1, 2, 3, 5)).reshape(-1)[:context]
        return terms * self._position_weights[:context]
