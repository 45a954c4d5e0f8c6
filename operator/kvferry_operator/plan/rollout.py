"""The next step from older revisions to the wanted one, on numbers alone.

A step is derived from what is observed; nothing is remembered between steps. For each pool: new pods come one at a
time beside the old ones, and as many old ones leave as new ones are ready. No old pod leaves before each pool has a new
one ready, since KV is ferried within a revision only.

    new  = min(wanted, max(new now, wanted + SURGE - old now))
    old  = wanted - ready new, once every pool has a ready new pod; ready old pods stay longest
"""

from collections.abc import Mapping

import msgspec

SURGE = 1


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One Deployment of a pool."""

    revision: str
    replicas: int  # asked for
    ready: int  # that would answer


class RoleState(msgspec.Struct, frozen=True, kw_only=True):
    """A pool at all revisions that have pods."""

    wanted: int
    pools: tuple[PoolState, ...] = ()

    def of(self, revision: str) -> PoolState:
        """The pool at a revision; empty where there is none."""
        found = [pool for pool in self.pools if pool.revision == revision]
        return found[0] if found else PoolState(revision=revision, replicas=0, ready=0)


Step = dict[str, dict[str, int]]  # role -> revision -> replicas


def next_step(roles: Mapping[str, RoleState], target: str) -> Step:
    """Replicas of each pool at each revision. At the goal it is what is observed already."""
    paired = all(state.of(target).ready > 0 for state in roles.values() if state.wanted > 0)
    return {role: _role_step(state, target, paired) for role, state in roles.items()}


def done(roles: Mapping[str, RoleState], target: str) -> bool:
    """Whether only the target has pods, all of them ready."""
    return all(
        state.of(target).ready >= state.wanted
        and not any(pool.replicas for pool in state.pools if pool.revision != target)
        for state in roles.values()
    )


def _role_step(state: RoleState, target: str, paired: bool) -> dict[str, int]:
    new = state.of(target)
    old = [pool for pool in state.pools if pool.revision != target]
    old_now = sum(pool.replicas for pool in old)
    grown = state.wanted + SURGE - old_now if old_now else state.wanted
    step = {target: min(state.wanted, max(new.replicas, grown))}
    keep = max(0, state.wanted - (new.ready if paired else 0))
    return step | _kept(old, keep)


def _kept(old: list[PoolState], keep: int) -> dict[str, int]:
    """Share out how many old pods stay: ready ones first."""
    kept = dict.fromkeys((pool.revision for pool in old), 0)
    by_ready = sorted(old, key=lambda pool: (-pool.ready, pool.revision))
    for ready_alone in (True, False):
        for pool in by_ready:
            most = min(pool.ready, pool.replicas) if ready_alone else pool.replicas
            more = min(most - kept[pool.revision], keep)
            kept[pool.revision] += more
            keep -= more
    return kept
