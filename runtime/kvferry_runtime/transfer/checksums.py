"""Checksums of ferried blocks: 64 bits of XXH3 for each, made when the lease is granted, checked by the reader.

They find what no lease can: a byte that changed on its way (TCP's own 16 bits let one damaged segment in 65,536 pass),
and a block that its owner overwrote after it had granted it. They find faults, not forgers: the function has no key.
The handle that carries them has a MAC.
"""

from collections.abc import Sequence

import xxhash

from kvferry_runtime.transfer.memory import BlockMemory

METHOD = "xxh3-64"
SUM_BYTES = 8
CHECKED_AT_ONCE = 2**19  # bytes: what has just arrived is checked while it is still in a core's cache


def block_sums(memory: BlockMemory, blocks: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
    """Per KV group: the checksums of these blocks, `SUM_BYTES` each, one after the other."""
    return tuple(
        b"".join(xxhash.xxh3_64_digest(memory.block(group, block_id)) for block_id in ids)
        for group, ids in enumerate(blocks)
    )


def are_complete(sums: Sequence[bytes], groups: int, blocks: int) -> bool:
    """Whether these are the checksums of so many blocks in each of so many groups."""
    return len(sums) == groups and all(len(of_group) == blocks * SUM_BYTES for of_group in sums)


def first_damaged(blocks: Sequence[memoryview], sums: bytes, first: int) -> int | None:
    """The first block that is not what its owner granted, as its index in the lease's order; ``None``: all are.

    Args:
        blocks: what has arrived of blocks ``first .. first + len(blocks)`` of a group's lease.
        sums: of the group's whole lease.
    """
    found = [xxhash.xxh3_64_digest(block) for block in blocks]
    begin = first * SUM_BYTES
    if b"".join(found) == sums[begin : begin + len(found) * SUM_BYTES]:
        return None
    for index, each in enumerate(found, first):
        if each != sums[index * SUM_BYTES : (index + 1) * SUM_BYTES]:
            return index
    raise AssertionError("equal blocks, and not equal as a whole")
