"""The error of a broken invariant, and the arithmetic of the block accounts."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping


class IntegrityError(RuntimeError):
    """An invariant of the engine's own books does not hold; the message prints every term."""


def check_block_accounts(
    *,
    total: int,
    free: Iterable[int],
    idle_cached: Iterable[int],
    refs: Mapping[int, int],
    owners: Mapping[str, Iterable[int]],
) -> None:
    """Check that each block is in exactly one place and that each reference has an owner.

    Args:
        total: usable blocks; their ids are 1..total.
        free: ids on the free list.
        idle_cached: ids in the prefix cache that nobody references.
        refs: references per referenced block.
        owners: what owns references -> the ids it references, one entry per reference.

    Raises:
        IntegrityError: naming every account that does not add up.
    """
    free_ids, cached_ids = list(free), list(idle_cached)
    held = {owner: list(ids) for owner, ids in owners.items()}
    faults = []
    places = [*free_ids, *cached_ids, *refs]
    if len(places) != total or set(places) != set(range(1, total + 1)):
        count = Counter(places)
        missing = sorted(set(range(1, total + 1)) - set(count))
        twice = sorted(block for block, times in count.items() if times > 1)
        foreign = sorted(set(count) - set(range(1, total + 1)))
        faults.append(f"blocks in no place {missing}, in two places {twice}, unknown {foreign}")
    faults += _reference_faults(refs, held)
    if faults:
        raise IntegrityError(_told(total, len(free_ids), len(cached_ids), refs, held) + "; ".join(faults))


def check_live_accounts(
    *, total: int, free: int, idle_cached: int, refs: Mapping[int, int], owners: Mapping[str, Iterable[int]]
) -> None:
    """The part of ``check_block_accounts`` that takes only as long as there are references.

    Args:
        free, idle_cached: how many blocks are there; which ones is not looked at.

    Raises:
        IntegrityError: places do not add up to all blocks, or a reference has no owner.
    """
    held = {owner: list(ids) for owner, ids in owners.items()}
    faults = _reference_faults(refs, held)
    if free + idle_cached + len(refs) != total:
        faults.append("places do not add up to all blocks")
    if faults:
        raise IntegrityError(_told(total, free, idle_cached, refs, held) + "; ".join(faults))


def _reference_faults(refs: Mapping[int, int], held: Mapping[str, list[int]]) -> list[str]:
    owned = Counter(itertools.chain.from_iterable(held.values()))
    if owned == refs:
        return []
    faults = []
    for block in sorted(set(refs) | set(owned)):
        if refs.get(block, 0) != owned[block]:
            by_owner = {owner: ids.count(block) for owner, ids in held.items() if block in ids}
            faults.append(f"block {block} has {refs.get(block, 0)} references, owners hold {by_owner}")
    return faults


def _told(total: int, free: int, cached: int, refs: Mapping[int, int], held: Mapping[str, list[int]]) -> str:
    sums = ", ".join(f"{owner}={len(ids)}" for owner, ids in held.items())
    return (
        f"block accounts: total={total} free={free} cached={cached} used={len(refs)} "
        f"references={sum(refs.values())} ({sums}): "
    )
