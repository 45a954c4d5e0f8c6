"""Which pod holds which KV blocks: block hash -> pods, fed by the pods' state streams.

A hint and nothing more: a pod compares token ids itself, so a wrong entry costs time and never a wrong token. One
mapping from hash to a bit per pod serves a lookup; one set per pod serves its removal. Both are bounded.
"""

from collections.abc import Iterable, Sequence


class IndexIntegrityError(AssertionError):
    """The two views of the index differ; the message gives both."""


class PrefixIndex:
    """Block hashes per pod.

    Args:
        max_blocks: entries (a hash at a pod) at most, over all pods; further ones are dropped and counted.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._bits: dict[bytes, int] = {}  # hash -> bit mask of slots
        self._held: dict[str, set[bytes]] = {}
        self._slot: dict[str, int] = {}
        self._blocks = 0
        self.dropped = 0  # entries not taken for want of room

    def __repr__(self) -> str:
        return f"PrefixIndex(pods={len(self._held)}, hashes={len(self._bits)}, blocks={self._blocks})"

    @property
    def blocks(self) -> int:
        """Entries held: a hash counts once per pod that has it."""
        return self._blocks

    def store(self, pod: str, hashes: Iterable[bytes]) -> None:
        """Note that a pod has these blocks. Idempotent."""
        held = self._held.get(pod)
        if held is None:
            held = self._held[pod] = set()
            self._slot[pod] = self._free_slot()
        bit = 1 << self._slot[pod]
        for block in hashes:
            if block in held:
                continue
            if self._blocks >= self._max_blocks:
                self.dropped += 1
                continue
            held.add(block)
            self._bits[block] = self._bits.get(block, 0) | bit
            self._blocks += 1

    def remove(self, pod: str, hashes: Iterable[bytes]) -> None:
        """Note that a pod has these blocks no more; unknown ones are ignored."""
        held = self._held.get(pod)
        if held is None:
            return
        for block in hashes:
            if block in held:
                held.discard(block)
                self._unset(block, self._slot[pod])

    def drop(self, pod: str) -> None:
        """Forget all that a pod had."""
        held = self._held.pop(pod, None)
        if held is None:
            return
        slot = self._slot.pop(pod)
        for block in held:
            self._unset(block, slot)

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """For each pod the number of leading blocks of the sequence that it holds; pods with none are left out."""
        alive = sum(1 << slot for slot in self._slot.values())
        ended: list[tuple[int, int]] = []  # (pods whose run ended here, its length)
        for depth, block in enumerate(hashes):
            here = alive & self._bits.get(block, 0)
            if here != alive:
                ended.append((alive & ~here, depth))
                alive = here
                if not alive:
                    break
        ended.append((alive, len(hashes)))
        return {pod: length for mask, length in ended if length for pod, slot in self._slot.items() if mask >> slot & 1}

    def check_integrity(self) -> None:
        """Compare the two views. Raises ``IndexIntegrityError``."""
        expected: dict[bytes, int] = {}
        for pod, held in self._held.items():
            for block in held:
                expected[block] = expected.get(block, 0) | 1 << self._slot[pod]
        count = sum(map(len, self._held.values()))
        slots = sorted(self._slot.values())
        if expected != self._bits or count != self._blocks or len(set(slots)) != len(slots):
            raise IndexIntegrityError(
                f"by pod: {len(expected)} hashes, {count} blocks; by hash: {len(self._bits)} hashes, "
                f"{self._blocks} blocks counted; slots {slots}"
            )

    def _unset(self, block: bytes, slot: int) -> None:
        self._blocks -= 1
        left = self._bits[block] & ~(1 << slot)
        if left:
            self._bits[block] = left
        else:
            del self._bits[block]

    def _free_slot(self) -> int:
        taken = set(self._slot.values())
        slot = 0
        while slot in taken:
            slot += 1
        return slot
