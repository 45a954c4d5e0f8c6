"""A schedule of faults is a function of its seed, and what a run needs: every kind, healed in time, pods to spare."""

import random

import pytest

from tests.chaos.faults import rules_of
from tests.chaos.namespaces import LinkRule
from tests.chaos.schedule import ENDING, LEAST_S, Fault, Kind, Topology
from tests.chaos.stage import CALM_S
from tests.chaos.stages import MEMORY_S, STAGES, fault_seconds, included, schedule_of

TWO = Topology(prefill=("p0", "p1"), decode=("d0", "d1"), routers=("r0", "r1"))
TOPOLOGIES = {
    "toy": TWO,
    "loss": TWO,
    "smollm2": Topology(prefill=("p0",), decode=("d0", "d1"), routers=("r0",)),
}
SEEDS = range(200)


def schedule(name: str, seed: int, seconds: float) -> tuple[Fault, ...]:
    return schedule_of(name, seed, seconds, TOPOLOGIES[name])


def test_a_seed_gives_one_schedule_whatever_else_is_drawn() -> None:
    """The same twice, another one for another seed."""
    first = schedule("toy", 7, 600)
    random.seed(1)
    random.random()
    assert schedule("toy", 7, 600) == first
    assert schedule("toy", 8, 600) != first


@pytest.mark.parametrize("name", STAGES)
def test_ten_minutes_bring_a_hundred_faults_of_every_kind(name: str) -> None:
    """More than 100 in both stages together, each kind of a stage among them."""
    for seed in SEEDS:
        faults = schedule(name, seed, 600)
        assert {fault.kind for fault in faults} == set(STAGES[name].kinds)
        assert len(faults) >= {"toy": 110, "loss": 2, "smollm2": 24}[name]


def test_what_cannot_be_had_is_left_out_and_the_rest_comes() -> None:
    """As where no cgroup can be made: no such fault, and every other kind."""
    for seed in SEEDS:
        faults = schedule_of("toy", seed, 120, TWO, {Kind.OOM_KILL: "why"})
        assert {fault.kind for fault in faults} == set(STAGES["toy"].kinds) - {Kind.OOM_KILL}


def test_two_minutes_bring_every_kind_to_the_toy() -> None:
    """The short run leaves out none, and has at least twenty faults."""
    for seed in SEEDS:
        faults = schedule("toy", seed, 120)
        assert {fault.kind for fault in faults} == set(STAGES["toy"].kinds)
        assert len(faults) + len(schedule("smollm2", seed, 120)) >= 20


@pytest.mark.parametrize("name", STAGES)
def test_all_is_healed_when_faults_are_over(name: str) -> None:
    """Every fault ends by then, after it began, in the order of their numbers, at pods that there are."""
    for seed in SEEDS:
        faults = schedule(name, seed, 300)
        assert [fault.number for fault in faults] == list(range(len(faults)))
        assert sorted(faults, key=lambda fault: fault.at) == list(faults)
        for fault in faults:
            assert 0 <= fault.at <= fault.until <= fault_seconds(name, 300)
            assert fault.at < fault_seconds(name, 300) - LEAST_S
            assert set(fault.targets) <= set(TOPOLOGIES[name].pods)
            assert fault.targets or fault.kind is Kind.LOSS


def test_one_pod_of_each_role_outlives_the_second_half() -> None:
    """Nothing ends its processes: the slope of its memory is of one life."""
    for seed in SEEDS:
        half = fault_seconds("toy", 600) / 2
        ended = {
            target
            for fault in schedule("toy", seed, 600)
            if fault.at > half and fault.kind in ENDING
            for target in fault.targets
        }
        for role in (TOPOLOGIES["toy"].prefill, TOPOLOGIES["toy"].decode, TOPOLOGIES["toy"].routers):
            assert set(role) - ended


def test_faults_of_links_say_what_is_lost_and_where() -> None:
    """Both ways, one way, one pod from all, shares of everything, slow in one direction."""

    def rules(kind: Kind, targets: tuple[str, ...], value: float = 0.0) -> set[LinkRule]:
        return set(rules_of(Fault(number=0, kind=kind, at=1, until=2, targets=targets, value=value)))

    there, back = LinkRule(source="p0", target="d0"), LinkRule(source="d0", target="p0")
    assert rules(Kind.CUT, ("p0", "d0")) == {there, back}
    assert rules(Kind.CUT_ONE_WAY, ("p0", "d0")) == {there}
    assert rules(Kind.ISOLATE, ("p0",)) == {LinkRule(source="", target="p0"), LinkRule(source="p0", target="")}
    assert rules(Kind.LOSS, (), 0.05) == {LinkRule(source="", target="", lost=0.05)}
    assert rules(Kind.THROTTLE, ("p0", "d0"), 1000.0) == {LinkRule(source="p0", target="d0", bytes_per_s=1000.0)}
    with pytest.raises(ValueError, match="kill_pod is no fault of links"):
        rules(Kind.KILL_POD, ("p0",))


def test_stages_of_a_run() -> None:
    """Two minutes are for the two models; ten also for lost packets alone, and long enough for a slope of memory."""
    assert included(120) == ["toy", "smollm2"]
    assert included(600) == ["toy", "loss", "smollm2"]
    assert fault_seconds("toy", 600) >= MEMORY_S
    assert [fault.value for fault in schedule("loss", 1, 600)] == [0.05, 0.2]


def test_a_run_takes_about_the_time_it_is_given() -> None:
    """Faults of both stages and what is around them."""
    for seconds in (120.0, 600.0):
        total = sum(fault_seconds(name, seconds) + CALM_S for name in included(seconds))
        assert 0.6 * seconds < total < seconds
