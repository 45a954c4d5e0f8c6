"""Runs a model over paged KV without an engine: shuffled blocks, any chunking, several sequences at once."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvferry_runtime.attention.backend import AttentionBatch
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.model.interface import Model


@dataclass
class PagedSequence:
    """One sequence: its tokens so far, how many of them are in KV, and its blocks."""

    ids: list[int]
    done: int = 0
    table: list[int] = field(default_factory=list)


class PagedRun:
    """KV memory for one model, poisoned, and sequences on scattered blocks of it."""

    def __init__(self, model: Model, *, block_size: int = 4, blocks: int = 256, seed: int = 0) -> None:
        self.model = model
        self.kv = KVMemory(model.kv_groups(), block_size, blocks)
        self.kv.poison()
        self._free = list(range(1, blocks))
        random.Random(seed).shuffle(self._free)

    def sequence(self, ids: Sequence[int]) -> PagedSequence:
        """A sequence with nothing computed."""
        return PagedSequence(list(ids))

    def step(self, rows: Sequence[tuple[PagedSequence, int]]) -> list[Tensor]:
        """Compute the next so many tokens of each sequence at once; each row's hidden states."""
        tokens: list[int] = []
        positions: list[int] = []
        for sequence, count in rows:
            end = sequence.done + count
            while len(sequence.table) * self.kv.block_size < end:
                sequence.table.append(self._free.pop())
            tokens += sequence.ids[sequence.done : end]
            positions += range(sequence.done, end)
            sequence.done = end
        counts = [count for _, count in rows]
        batch = AttentionBatch.build(
            counts, [row.done for row, _ in rows], [row.table for row, _ in rows], self.kv.block_size
        )
        hidden = self.model.forward(torch.tensor(tokens), torch.tensor(positions), self.kv, batch)
        return list(hidden.split(counts))

    def logits(self, ids: Sequence[int], chunks: Sequence[int] = ()) -> Tensor:
        """Scores after each position of a fresh sequence, computed in these chunks: [len(ids), vocab]."""
        sequence = self.sequence(ids)
        rest = len(ids) - sum(chunks)
        parts = [self.step([(sequence, count)])[0] for count in (*chunks, *([rest] if rest else []))]
        return self.model.logits(torch.cat(parts))

    def greedy(self, sequence: PagedSequence, count: int) -> list[int]:
        """Continue a sequence whose tokens are not all computed yet by ``count`` picks."""
        picked: list[int] = []
        for _ in range(count):
            hidden = self.step([(sequence, len(sequence.ids) - sequence.done)])[0]
            token = int(self.model.logits(hidden[-1:])[0].argmax())
            picked.append(token)
            sequence.ids.append(token)
        return picked
