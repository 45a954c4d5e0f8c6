"""What a leg that goes on elsewhere leaves behind: which of its KV is worth a transfer. Pure.

With one choice, all that was computed: the last emitted id has no KV yet, so it never counts. With several, they share
no more than the prompt; the block in which the prompt ends belongs to one of them, so only whole blocks count once the
choices went apart.
"""

from typing import NamedTuple

from kvferry_runtime.core.leg import LiveLeg
from kvferry_runtime.core.sequence import Sequence, State

_HAS_KV = (State.RUNNING, State.READY)


class Parcel(NamedTuple):
    """Blocks, and the ids whose K and V they hold, in order."""

    blocks: tuple[int, ...]
    ids: tuple[int, ...]


def parcel_of(leg: LiveLeg, block_size: int) -> Parcel | None:
    """The most that one of the leg's sequences has for whoever goes on; ``None`` when nothing is computed.

    Never call it in a step: what a step writes is not there yet.
    """
    owners = [sequence for sequence in leg.sequences if sequence.state in _HAS_KV]
    sequence = max(owners, key=lambda owner: _worth(owner, block_size), default=None)
    count = 0 if sequence is None else _worth(sequence, block_size)
    if sequence is None or not count:
        return None
    return Parcel(tuple(sequence.table[: -(-count // block_size)]), tuple(sequence.tokens[:count]))


def _worth(sequence: Sequence, block_size: int) -> int:
    """Positions that can be given away."""
    leg, computed = sequence.leg, sequence.computed
    if len(leg.choices) == 1 or sequence.choice is None:
        return computed
    return min(computed, leg.prompt_len) // block_size * block_size
