"""The rollout's arithmetic: exact steps first, then properties over random pools."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_operator.plan.rollout import SURGE, PoolState, RoleState, done, next_step


def role(wanted: int, **pools: tuple[int, int]) -> RoleState:
    """A role with (replicas, ready) by revision."""
    made = (PoolState(revision=name, replicas=count, ready=ready) for name, (count, ready) in pools.items())
    return RoleState(wanted=wanted, pools=tuple(made))


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        # nothing yet: all at once
        ({"decode": role(3)}, {"decode": {"b": 3}}),
        # at the goal: nothing changes
        ({"decode": role(2, b=(2, 2))}, {"decode": {"b": 2}}),
        # scale only
        ({"decode": role(4, b=(2, 2))}, {"decode": {"b": 4}}),
        ({"decode": role(1, b=(2, 2))}, {"decode": {"b": 1}}),
        # a new revision: one beside the old
        ({"decode": role(2, a=(2, 2))}, {"decode": {"b": 1, "a": 2}}),
        # it is ready: one old leaves
        ({"decode": role(2, a=(2, 2), b=(1, 1))}, {"decode": {"b": 1, "a": 1}}),
        ({"decode": role(2, a=(1, 1), b=(1, 1))}, {"decode": {"b": 2, "a": 1}}),
        ({"decode": role(2, a=(1, 1), b=(2, 2))}, {"decode": {"b": 2, "a": 0}}),
        # decode is ready, prefill is not: no old pod leaves, since KV is ferried within a revision
        (
            {"prefill": role(1, a=(1, 1), b=(1, 0)), "decode": role(1, a=(1, 1), b=(1, 1))},
            {"prefill": {"b": 1, "a": 1}, "decode": {"b": 1, "a": 1}},
        ),
        # a pool of none holds nobody up
        (
            {"prefill": role(0), "decode": role(1, a=(1, 1), b=(1, 1))},
            {"prefill": {"b": 0}, "decode": {"b": 1, "a": 0}},
        ),
        # the new revision never became ready and a third follows: the broken one goes, the serving one stays
        ({"decode": role(2, a=(2, 2), x=(1, 0))}, {"decode": {"b": 0, "a": 2, "x": 0}}),
        # down to nothing
        ({"decode": role(0, a=(2, 2))}, {"decode": {"b": 0, "a": 0}}),
    ],
)
def test_steps(roles: dict[str, RoleState], expected: dict[str, dict[str, int]]) -> None:
    """The step to revision b from what is observed."""
    assert next_step(roles, "b") == expected


counts = st.integers(0, 5)
pools = st.dictionaries(st.sampled_from("abxy"), st.tuples(counts, counts), max_size=4).map(
    lambda made: {name: (count, min(count, ready)) for name, (count, ready) in made.items()}
)


@settings(deadline=None, max_examples=200)
@given(wanted=st.lists(counts, min_size=1, max_size=2), states=st.lists(pools, min_size=2, max_size=2))
def test_a_rollout_ends_and_never_lowers_what_answers(
    wanted: list[int], states: list[dict[str, tuple[int, int]]]
) -> None:
    """From any state: ready pods never fall below what is wanted, or what was ready; the surge holds; it ends."""
    roles = {f"r{index}": role(count, **states[index]) for index, count in enumerate(wanted)}
    floor = {name: min(state.wanted, sum(pool.ready for pool in state.pools)) for name, state in roles.items()}
    start = {name: sum(pool.replicas for pool in state.pools) for name, state in roles.items()}
    for _ in range(100):
        step = next_step(roles, "b")
        for name, state in roles.items():
            ready = {pool.revision: pool.ready for pool in state.pools}
            # Pods that leave are the ready ones in the worst case.
            answering = sum(min(count, ready.get(revision, 0)) for revision, count in step[name].items())
            assert answering >= floor[name]
            assert sum(step[name].values()) <= max(state.wanted + SURGE, start[name])
        changed = {
            name: role(
                state.wanted,
                **{
                    revision: (count, count if revision == "b" else min(count, state.of(revision).ready))
                    for revision, count in step[name].items()
                },
            )
            for name, state in roles.items()
        }
        if changed == roles:
            break
        roles = changed
    assert done(roles, "b")
    assert all(state.of("b").replicas == state.wanted for state in roles.values())
