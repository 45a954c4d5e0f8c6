"""The toy model in plain Python behind the step plan: real KV blocks of integers, read and written by block table.

The memory of a new process is noise, and a freed block keeps what it held, so that a missing, stale, foreign or
misplaced block gives another token than the oracle's.
"""

import random
from array import array
from collections import Counter

from kvferry_runtime.core.plan import Pick, Row, StepPlan, StepResult
from kvferry_runtime.model.toy_oracle import MASK, ROOT, candidates_of, digest_of, element_weights, position_weight
from tests.simulation.models import SPEC, Model
from tests.simulation.picking import pick_token
from tests.simulation.world import Violation

_POSITION_WEIGHTS = [position_weight(position) for position in range(4096)]


class ToyMemory:
    """KV blocks of one engine: per block, K of each slot and then V of each slot, 64-bit integers."""

    def __init__(self, blocks: int, block_size: int, rng: random.Random) -> None:
        self.block_size = block_size
        self.blocks = [array("Q", [rng.getrandbits(64) for _ in range(2 * block_size)]) for _ in range(blocks)]
        self.tenants: list[bytes | None] = [None] * blocks  # whose KV was written into a block last

    def block(self, group: int, block_id: int) -> memoryview:
        """As the transfer sees it: `transfer.memory.BlockMemory`."""
        return memoryview(self.blocks[block_id]).cast("B")

    def read(self, block: int) -> bytes:
        return self.blocks[block].tobytes()

    def write(self, block: int, data: bytes, tenant: bytes | None) -> None:
        self.tenants[block] = tenant
        content = array("Q")
        content.frombytes(data)
        self.blocks[block][:] = content

    def spoil(self, plan: StepPlan, rng: random.Random) -> None:
        """Noise in some of the slots that the step was to write."""
        for row in plan.rows:
            for position in range(row.first, row.first + len(row.token_ids)):
                if rng.random() < 0.5:
                    slot = position % self.block_size
                    self.blocks[row.table[position // self.block_size]][slot] = rng.getrandbits(64)

    @property
    def block_bytes(self) -> int:
        return 16 * self.block_size


class ToyRunner:
    """Computes step plans."""

    def __init__(self, memory: ToyMemory, model: Model) -> None:
        self._memory = memory
        self._model = model
        ((self._k_weight, self._v_weight),) = element_weights(1)

    def step(self, plan: StepPlan) -> StepResult:
        blocks = self._memory.blocks
        for copy in plan.copies:
            blocks[copy.target][:] = blocks[copy.source]
        # All rows are written before any is read, as a batch on a device does it.
        for row in plan.rows:
            self._write(row)
        return StepResult(tuple([token for row in plan.rows for token in self._picks(row)]))

    def _write(self, row: Row) -> None:
        size, blocks = self._memory.block_size, self._memory.blocks
        previous = ROOT
        if row.first:
            at = row.first - 1
            previous = blocks[row.table[at // size]][at % size]
        for position, token in enumerate(row.token_ids, row.first):
            previous = digest_of(token, position, previous)
            block = blocks[row.table[position // size]]
            block[position % size] = previous
            block[size + position % size] = ~previous & MASK

    def _picks(self, row: Row) -> list[int]:
        if not row.picks:
            return []
        size = self._memory.block_size
        state = 0
        position = 0
        context = row.first + len(row.token_ids)
        for block_id in row.table:
            block = self._memory.blocks[block_id]
            for slot in range(min(size, context - position)):
                term = self._k_weight * block[slot] + self._v_weight * block[size + slot]
                state += _POSITION_WEIGHTS[position] * term
                position += 1
        candidates = self._model.candidates(candidates_of(state & MASK, SPEC))
        return [self._pick(candidates, pick) for pick in row.picks]

    @staticmethod
    def _pick(candidates: tuple[int, ...], pick: Pick) -> int:
        return pick_token(candidates, pick.sampling, pick.seed, pick.position, pick.banned)


def check_tenants(plan: StepPlan, memory: ToyMemory, salts: dict[int, bytes]) -> None:
    """A row reads only what was written for its own tenant; note whose it writes.

    Args:
        salts: tenant salt by sequence number.

    Raises:
        Violation: naming row and block.
    """
    for copy in plan.copies:
        memory.tenants[copy.target] = memory.tenants[copy.source]
    for row in plan.rows:
        salt = salts[row.sequence]
        for block in row.table[: -(-row.first // memory.block_size)]:
            if memory.tenants[block] != salt:
                other = memory.tenants[block]
                raise Violation("tenants", f"row {row.sequence} of {salt!r} reads block {block} of {other!r}")
        for block in row.table[row.first // memory.block_size :]:
            memory.tenants[block] = salt


def check_writes(plan: StepPlan, block_size: int, references: dict[int, int], quarantined: frozenset[int]) -> None:
    """Each slot that a step writes has one writer, and its block one owner and no transfer that writes it.

    Raises:
        Violation: naming row, block and slot.
    """
    copied = Counter(copy.source for copy in plan.copies)
    targets = Counter(copy.target for copy in plan.copies)
    written: dict[tuple[int, int], int] = {}
    for block, times in targets.items():
        if times > 1 or references.get(block, 0) != 1 or block in quarantined:
            raise Violation("two_writers", f"copy into block {block}: {times} times, {references.get(block, 0)} owners")
    for row in plan.rows:
        for position in range(row.first, row.first + len(row.token_ids)):
            block, slot = row.table[position // block_size], position % block_size
            if references.get(block, 0) != 1 + copied[block] or block in quarantined:
                raise Violation(
                    "two_writers",
                    f"{plan!r}: row {row.sequence} writes block {block}, which has {references.get(block, 0)} owners"
                    f"{' and is written by a transfer' if block in quarantined else ''}",
                )
            if (block, slot) in written:
                raise Violation("two_writers", f"{plan!r}: block {block} slot {slot} is written twice")
            written[block, slot] = row.sequence
