"""The decision cores of router, prefill and decode keep every promise under hundreds of fault schedules."""

import os
from collections import Counter

import pytest

from tests.simulation.report import describe
from tests.simulation.run import run_scenario
from tests.simulation.scenario import PROFILES, STAGES, make_scenario
from tests.simulation.shrink import shrink

SEEDS = int(os.environ.get("KVFERRY_SIM_SEEDS", "1500"))

# What so many seeds must have done at least, per 100 of them: a harness in which nothing happens shows nothing.
WORK_PER_100 = {
    "requests": 800,
    "client_ok": 600,
    "resumed_dead": 15,
    "resumed_failed": 4,
    "resumed_stalled": 15,
    "resumed_by_a_pair": 10,
    "resumes_that_waited": 1,
    "answers_of_three_pods_or_more": 6,
    "gave_up_barren": 1,
    "gave_up_no_pod": 3,
    "gave_up_transfer": 4,
    "client_stopping": 1,
    "client_no_end": 3,
    "pairs_barred": 3,
    "pods_poisoned": 4,
    **dict.fromkeys([f"left_in_{stage}" for stage in STAGES], 0.5),
    "clients_left": 20,
    "transfers": 200,
    "transfers_failed": 40,
    "recomputed": 150,
    "preemptions": 15,
    "forks": 100,
    "legs_tried_again": 10,
    "lost": 200,
    "doubled": 200,
    "delayed": 300,
    "repeated": 30,
    "cut": 10,
    "lost_in_partition": 100,
    "fault_crash": 5,
    "fault_crash_prefill": 8,
    "fault_pause": 5,
    "fault_slow_steps": 5,
    "fault_part": 3,
    "fault_part_one_way": 3,
    "fault_part_control": 8,
    "fault_cut_streams": 10,
    "fault_reset_cache": 5,
    "fault_drain": 1,
    "fault_depart": 8,
    "departed": 6,
    "legs_moved": 3,
    "resumed_moved": 2,
    "fault_engine_dies": 2,
    "fault_squeeze": 6,
    "blocks_squeezed": 60,
    "fault_crash_router": 4,
    "fault_stop_router": 2,
    "steps_failed": 3,
    "client_deadline_exceeded": 4,
    "handle_mac": 1,
    "handle_digest": 1,
    "prefill_stalled": 10,
    "decode_stalled": 10,
    "messages_for_older_incarnations": 2,
    "blocks_sent_after_their_lease": 20,
}


@pytest.mark.slow
@pytest.mark.timeout(max(120, SEEDS))
def test_every_seed_holds() -> None:
    """No invariant breaks after any event of any seed, all comes to rest at the end, and enough has gone wrong."""
    totals: Counter[str] = Counter()
    for seed in range(SEEDS):
        report = run_scenario(make_scenario(seed))
        totals.update(report.counts)
        if report.violation is not None:
            pytest.fail(describe(shrink(report)), pytrace=False)
    if 10 * len(PROFILES) <= SEEDS:
        idle = {what: totals[what] for what, least in WORK_PER_100.items() if totals[what] < least * SEEDS / 100}
        assert not idle, f"too little of it happened: {idle}"
