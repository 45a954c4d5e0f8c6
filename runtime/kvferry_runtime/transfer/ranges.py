"""Cutting a lease's blocks into read requests, and judging a request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry_wire.data import ReadRequest
from kvferry_wire.limits import Limits


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks ``first .. first+count`` of a group, in the lease's own order."""

    group: int
    first: int
    count: int


def read_ranges(block_counts: Sequence[int], block_bytes: Sequence[int], limits: Limits) -> list[BlockRange]:
    """Cut all blocks of all groups into reads of at most `read_blocks` blocks and about `read_bytes` bytes."""
    ranges = []
    for group, (blocks, nbytes) in enumerate(zip(block_counts, block_bytes, strict=True)):
        step = max(1, min(limits.read_blocks, limits.read_bytes // nbytes))
        ranges += [BlockRange(group, first, min(step, blocks - first)) for first in range(0, blocks, step)]
    return ranges


def requested_blocks(
    request: ReadRequest, blocks: tuple[tuple[int, ...], ...], limits: Limits
) -> tuple[int, ...] | None:
    """The owner's block ids that a request names, or ``None`` if it names what the lease does not hold."""
    if not 0 <= request.group < len(blocks):
        return None
    held = blocks[request.group]
    if request.first < 0 or not 0 < request.count <= limits.read_blocks or request.first + request.count > len(held):
        return None
    return held[request.first : request.first + request.count]
