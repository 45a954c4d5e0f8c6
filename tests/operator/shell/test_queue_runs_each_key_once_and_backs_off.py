"""The work queue: de-duplicated, one run per key at a time, backing off, fair to keys that are well."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_operator.shell.queue import WARY_RUNS, Outcome, QueueLimits, WorkQueue

LIMITS = QueueLimits(
    workers=4, backoff_first_s=0.5, backoff_most_s=8.0, resync_s=600.0, gap_s=0.05, burst=5, pace_s=1.0
)
WELL, WROTE, FAILED = Outcome(), Outcome(wrote=True), Outcome(failed=True)


def make_queue(limits: QueueLimits = LIMITS, spread: float = 1.0) -> WorkQueue[str]:
    return WorkQueue(limits, lambda: spread)


def run(queue: WorkQueue[str], now: float, outcome: Outcome = WELL) -> str | None:
    """Take a key and end its run at once."""
    key = queue.take(now)
    if key is not None:
        queue.done(key, now, outcome)
    return key


def test_a_key_that_changes_many_times_runs_once() -> None:
    """Changes before a run are one run."""
    queue = make_queue()
    for _ in range(100):
        queue.add("a", 1.0)
    assert run(queue, 1.0) == "a"
    assert queue.take(2.0) is None


def test_a_change_during_a_run_runs_again_after_it() -> None:
    """What changed after the run looked is looked at, and never by two runs at once."""
    queue = make_queue()
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    queue.add("a", 0.1)
    queue.add("a", 0.2)
    assert queue.take(0.3) is None
    queue.done("a", 0.4, WELL)
    assert queue.take(0.44) is None
    assert run(queue, 0.45) == "a"
    assert queue.take(1.0) is None


def test_keys_run_in_the_order_in_which_they_changed() -> None:
    """First come, first served."""
    queue = make_queue()
    for index, key in enumerate("cab"):
        queue.add(key, float(index))
    assert [queue.take(10.0) for _ in range(4)] == ["c", "a", "b", None]


def test_what_changed_goes_before_what_comes_back_by_itself() -> None:
    """After a start all services are looked at, and nobody's change waits for that; each fourth turn is theirs."""
    queue = make_queue(LIMITS)
    for number in range(6):
        queue.add(f"all-{number}", 0.0, urgent=False)
        queue.add(f"new-{number}", 1.0)
    taken = []
    for _ in range(12):
        key = queue.take(2.0)
        assert key is not None
        taken.append(key)
        queue.done(key, 2.0, WELL)
    assert [index for index, key in enumerate(taken) if key.startswith("all")] == [3, 7, 8, 9, 10, 11]
    assert sorted(taken) == sorted({f"{kind}-{number}" for kind in ("all", "new") for number in range(6)})


def test_while_a_change_is_at_work_few_others_are() -> None:
    """A new leader looks at all its services: whoever edits one then does not wait for theirs between any two calls."""
    queue = make_queue(LIMITS)  # of 4 workers, one
    for number in range(9):
        queue.add(f"all-{number}", 0.0, urgent=False)
    queue.add("new", 1.0)
    assert [queue.take(2.0) for _ in range(3)] == ["new", "all-0", None]
    queue.done("all-0", 2.0, WELL)
    assert [queue.take(2.0) for _ in range(2)] == ["all-1", None]
    queue.done("new", 2.0, WELL)
    assert [queue.take(2.0) for _ in range(3)] == ["all-2", "all-3", "all-4"]
    queue.add("newer", 2.0)
    assert queue.take(2.0) == "newer"


def test_a_change_makes_a_waiting_key_urgent() -> None:
    """It does not wait at its former place."""
    queue = make_queue(LIMITS)
    for key in "abcd":
        queue.add(key, 0.0, urgent=False)
    queue.add("d", 1.0)
    queue.add("d", 1.0, urgent=False)
    assert queue.take(1.0) == "d"
    queue.done("d", 1.0, WELL)
    assert [queue.take(1.0) for _ in range(4)] == ["a", "b", "c", None]


def test_a_failing_key_backs_off_to_a_cap() -> None:
    """0.5 s, doubled at each failure, at most 8 s."""
    queue, now, gaps = make_queue(), 0.0, []
    queue.add("a", now)
    for _ in range(8):
        assert run(queue, now, FAILED) == "a"
        due = queue.next_due()
        assert due is not None
        gaps.append(due - now)
        now = due
    assert gaps == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]


def test_success_forgets_the_back_off() -> None:
    """The next failure waits the first time again."""
    queue = make_queue()
    queue.add("a", 0.0)
    run(queue, 0.0, FAILED)
    run(queue, 10.0, FAILED)
    run(queue, 20.0, WELL)
    queue.add("a", 30.0)
    run(queue, 30.0, FAILED)
    assert queue.next_due() == pytest.approx(30.5)


def test_progress_begins_the_back_off_anew() -> None:
    """A server that refuses each third call delays, it does not stop: every pass gets further."""
    queue, now, gaps = make_queue(), 0.0, []
    queue.add("a", now)
    for progressed in (False, False, True, True, False):
        run(queue, now, Outcome(failed=True, progressed=progressed))
        due = queue.next_due() or 0.0
        gaps.append(due - now)
        now = due
    assert gaps == [0.5, 1.0, 0.5, 0.5, 1.0]


def test_a_change_brings_a_failing_key_forward_but_not_at_once() -> None:
    """A person's fix is tried soon; a stream of changes is no hot loop."""
    queue = make_queue()
    queue.add("a", 0.0)
    now = 0.0
    for _ in range(5):
        run(queue, now, FAILED)
        now = queue.next_due() or 0.0
    run(queue, now, FAILED)
    queue.add("a", now + 0.1)
    assert queue.next_due() == pytest.approx(now + 0.5)


def test_a_key_at_rest_comes_back_after_the_resync_time() -> None:
    """Level-triggered also where a change was never told; spread so that keys do not come together."""
    early, late = make_queue(spread=0.0), make_queue(spread=1.0)
    for queue in (early, late):
        queue.add("a", 0.0)
        run(queue, 0.0)
    assert (early.next_due(), late.next_due()) == pytest.approx((480.0, 720.0))


def test_a_key_that_is_gone_leaves_nothing() -> None:
    """No resync of what does not exist; a change during its last run still counts."""
    queue = make_queue()
    queue.add("a", 0.0)
    run(queue, 0.0, Outcome(gone=True))
    assert len(queue) == 0
    assert queue.next_due() is None
    queue.add("a", 1.0)
    queue.take(1.0)
    queue.add("a", 1.5)
    queue.done("a", 2.0, Outcome(gone=True))
    assert queue.take(2.1) == "a"


def runs_in_a_minute(outcome: Outcome) -> int:
    """Runs of a key that changes all the time."""
    queue, now, runs = make_queue(), 0.0, 0
    while now < 60.0:
        queue.add("a", now)
        if run(queue, now, outcome) is not None:
            runs += 1
        now += 0.01
    return runs


def test_a_key_that_writes_without_end_is_paced() -> None:
    """Somebody who undoes each of our writes gets one a second after the burst, not thousands."""
    assert LIMITS.burst + 55 <= runs_in_a_minute(WROTE) <= LIMITS.burst + 61


def test_changes_that_need_no_write_are_looked_at_a_few_times_a_second() -> None:
    """A flood of events costs some passes, each from memory."""
    assert 900 <= runs_in_a_minute(WELL) <= 1201


def test_failing_keys_leave_half_of_the_workers_to_the_others() -> None:
    """Four services whose webhook hangs do not stop a fifth."""
    queue = make_queue()
    for key in "abcd":
        queue.add(key, 0.0)
        run(queue, 0.0, FAILED)
    for key in "xyz":
        queue.add(key, 5.0)
    taken = [queue.take(9.0) for _ in range(3)]
    assert taken == ["x", "y", "z"]
    for key in "xyz":
        queue.done(key, 9.0, WELL)
    assert [queue.take(9.0) for _ in range(3)] == ["a", "b", None]
    queue.done("a", 9.5, FAILED)
    assert queue.take(9.5) == "c"


def test_a_pause_holds_all_keys_and_few_run_after_it() -> None:
    """429 with Retry-After: nobody asks before; then at most two at once until one has succeeded."""
    queue = make_queue()
    for key in "abcdef":
        queue.add(key, 0.0)
    assert queue.take(0.0) == "a"
    queue.done("a", 0.0, Outcome(failed=True, pause_s=7.0))
    assert queue.take(6.9) is None
    assert queue.next_due() == 7.0
    taken = [queue.take(7.0) for _ in range(3)]
    assert taken == ["b", "c", None]
    assert sum(key is not None for key in taken) == WARY_RUNS
    queue.done("b", 7.1, WELL)
    assert [queue.take(7.1), queue.take(7.1)] == ["a", "d"]


def test_more_to_do_runs_again_at_once() -> None:
    """A pass that knows of more work need not wait for a change."""
    queue = make_queue()
    queue.add("a", 0.0)
    run(queue, 0.0, Outcome(again=True))
    assert queue.take(0.05) == "a"


def test_the_end_of_a_run_that_never_began_is_an_error() -> None:
    """A caller's bug changes nothing."""
    queue = make_queue()
    queue.add("a", 0.0)
    with pytest.raises(KeyError):
        queue.done("a", 0.0, WELL)
    with pytest.raises(KeyError):
        queue.done("b", 0.0, WELL)
    assert queue.take(0.0) == "a"


def test_the_oldest_run_is_known() -> None:
    """By it a stuck worker is noticed."""
    queue = make_queue()
    queue.add("a", 0.0)
    queue.add("b", 0.0)
    queue.take(1.0)
    queue.take(3.0)
    assert queue.longest_run(10.0) == 9.0
    queue.done("a", 10.0, WELL)
    assert queue.longest_run(10.0) == 7.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "take", "well", "fail", "pause", "gone"]),
            st.sampled_from("abcde"),
            st.floats(0, 5),
        ),
        max_size=120,
    )
)
def test_no_history_loses_a_change_or_runs_a_key_twice(history: list[tuple[str, str, float]]) -> None:
    """After any history every change is followed by a run that began after it, and the books add up."""
    queue, now = WorkQueue[str](LIMITS, random.Random(1).random), 0.0
    running: set[str] = set()
    dirty: set[str] = set()  # changed since its last run began
    ends = {"well": WELL, "fail": FAILED, "pause": Outcome(failed=True, pause_s=2.0), "gone": Outcome(gone=True)}
    for what, key, dt in history:
        now += dt
        if what == "add":
            queue.add(key, now)
            dirty.add(key)
        elif what == "take":
            if (taken := queue.take(now)) is not None:
                assert taken not in running
                running.add(taken)
                dirty.discard(taken)
        elif key in running:
            queue.done(key, now, ends[what])
            running.discard(key)
        assert queue.running() == len(running) <= 5
    for key in running:
        queue.done(key, now, WELL)
    seen: Counter[str] = Counter()
    for _ in range(200):
        due = queue.next_due()
        if due is None or due > now + 60:
            break
        now = max(now, due)
        taken = queue.take(now)
        assert taken is not None
        seen[taken] += 1
        queue.done(taken, now, WELL)
    assert dirty <= set(seen)
    assert queue.failing() == 0
    assert not queue.waiting(now)
