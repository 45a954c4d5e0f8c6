"""The error of a broken invariant, and the arithmetic of the block accounts."""

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
    counted = {owner: Counter(ids) for owner, ids in owners.items()}
    owned: Counter[int] = Counter()
    for ids in counted.values():
        owned.update(ids)
    faults = []
    places = Counter(free_ids) + Counter(cached_ids) + Counter(refs.keys())
    if set(places) != set(range(1, total + 1)) or any(count != 1 for count in places.values()):
        missing = sorted(set(range(1, total + 1)) - set(places))
        twice = sorted(block for block, count in places.items() if count > 1)
        foreign = sorted(set(places) - set(range(1, total + 1)))
        faults.append(f"blocks in no place {missing}, in two places {twice}, unknown {foreign}")
    for block in sorted(set(refs) | set(owned)):
        if refs.get(block, 0) != owned[block]:
            by_owner = {owner: ids[block] for owner, ids in counted.items() if ids[block]}
            faults.append(f"block {block} has {refs.get(block, 0)} references, owners hold {by_owner}")
    if faults:
        sums = ", ".join(f"{owner}={sum(ids.values())}" for owner, ids in counted.items())
        raise IntegrityError(
            f"block accounts: total={total} free={len(free_ids)} cached={len(cached_ids)} used={len(refs)} "
            f"references={sum(refs.values())} ({sums}): " + "; ".join(faults)
        )
