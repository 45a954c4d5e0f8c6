"""Renewal, repetition and deadlines of one pull: every wait ends, and no reply is needed for it."""

import pytest

from kvferry_runtime.transfer.flow import FlowState, TransferFlow
from kvferry_runtime.transfer.flow_messages import (
    Answered,
    BlocksGiven,
    BytesArrived,
    Finished,
    FlowEffect,
    Handshake,
    Read,
    ReadDone,
    ReadStarted,
    ReadStopped,
    SendFailed,
    SendRelease,
    SendRenew,
    StopRead,
    Tick,
    Welcomed,
)
from kvferry_runtime.transfer.reasons import RecomputeReason
from tests.runtime.transfer.builders import make_flow

MIB = 2**20


def run_until(flow: TransferFlow, until: float, *, answer: bool, now: float = 0.0) -> list[tuple[float, FlowEffect]]:
    """Tick whenever the flow asks to be woken; answer renewals with ``held`` if told to."""
    log: list[tuple[float, FlowEffect]] = []
    while (wake := flow.next_wake()) <= until:
        now = max(now, wake)
        for effect in flow.handle(Tick(), now):
            log.append((now, effect))
            if answer and isinstance(effect, SendRenew):
                flow.handle(Answered(effect.message_id, "held"), now + 0.01)
    return log


def make_reading(nbytes: int, now: float = 0.0, **limits: float) -> TransferFlow:
    flow = make_flow(now=now, **limits)
    flow.begin(now)
    flow.handle(Answered(1, "held"), now)
    flow.handle(Welcomed(), now)
    flow.handle(BlocksGiven(nbytes), now)
    flow.handle(ReadStarted(), now)
    return flow


def test_a_waiting_leg_renews_each_sixth_of_the_lease() -> None:
    """For ten leases' time, each renewal has a new id and comes on time."""
    flow = make_flow(lease_s=15.0, deadline=600.0)
    flow.begin(0.0)
    flow.handle(Answered(1, "held"), 0.01)
    log = run_until(flow, 150.0, answer=True)
    times = [at for at, effect in log if isinstance(effect, SendRenew)]
    assert len(times) == len(log) == 60
    assert times == pytest.approx([2.5 * step for step in range(1, 61)])
    assert flow.state is FlowState.HOLDING


def test_a_quick_pull_sends_no_renewal() -> None:
    """It is read and released before the first one is due; a leg that waits, or a long read, renews from then on."""
    flow = make_flow(now=5.0, first_renew_s=0.02)
    assert flow.begin(5.0) == [Handshake()]
    assert flow.next_wake() == 5.02
    flow.handle(Welcomed(), 5.0)
    (read,) = flow.handle(BlocksGiven(100), 5.001)
    flow.handle(ReadStarted(), 5.001)
    assert isinstance(read, Read)
    (finished,) = flow.handle(ReadDone("held"), 5.01)
    assert isinstance(finished, Finished) and finished.reason is None
    waits = make_flow(now=5.0, first_renew_s=0.02)
    waits.begin(5.0)
    assert waits.handle(Tick(), 5.019) == []
    assert waits.handle(Tick(), 5.02) == [SendRenew(1)]


def test_renewals_go_on_while_reading() -> None:
    """A long read keeps its lease alive."""
    flow = make_reading(10_000 * MIB)
    renewals = 0
    for step in range(1, 300):
        now = step * 0.1
        flow.handle(BytesArrived(step * 10 * MIB), now)
        if flow.next_wake() <= now:
            for effect in flow.handle(Tick(), now):
                assert isinstance(effect, SendRenew)
                renewals += 1
                flow.handle(Answered(effect.message_id, "held"), now)
    assert 10 <= renewals <= 12
    assert flow.state is FlowState.READING


def test_a_lost_reply_is_asked_for_again_with_the_same_id() -> None:
    """An unanswered renewal and an unanswered release are repeated, word for word."""
    flow = make_flow(lease_s=15.0)
    (_, first) = flow.begin(0.0)
    repeats = [effect for _, effect in run_until(flow, 2.0, answer=False)]
    assert repeats and set(repeats) == {first}
    flow = make_reading(100)
    (release,) = flow.handle(ReadDone(), 1.0)
    repeats = [effect for _, effect in run_until(flow, 2.6, answer=False, now=1.0)]
    assert repeats and set(repeats) == {release} and isinstance(release, SendRelease)
    assert flow.handle(Answered(release.message_id, "held"), 2.7)[-1].reason is None


def test_a_silent_owner_is_given_up_when_its_lease_may_be_over() -> None:
    """No renewal was answered for the lease's duration: the lease cannot be trusted any more."""
    flow = make_flow(lease_s=15.0)
    flow.begin(0.0)
    log = run_until(flow, 1000.0, answer=False)
    assert log[-1] == (15.0, SendFailed(2, "peer_dead"))
    assert flow.state is FlowState.LOST
    assert flow.reason is RecomputeReason.PEER_DEAD


def test_a_held_answer_counts_from_when_its_renewal_was_sent() -> None:
    """The owner extended the lease no earlier than that: the reader never believes more than it."""
    flow = make_flow(lease_s=15.0)
    flow.begin(0.0)
    flow.handle(Answered(1, "held"), 14.0)
    assert flow.next_wake() == 14.0
    run_until(flow, 14.9, answer=False, now=14.0)
    assert flow.state is FlowState.HOLDING
    run_until(flow, 15.0, answer=False, now=14.9)
    assert flow.reason is RecomputeReason.PEER_DEAD


def test_a_peer_that_never_welcomes_is_dead() -> None:
    """After the blocks are given the handshake has `connect_s`."""
    flow = make_flow(connect_s=2.0)
    flow.begin(0.0)
    flow.handle(BlocksGiven(100), 5.0)
    log = run_until(flow, 100.0, answer=False, now=5.0)
    assert log[-1] == (7.0, Finished(RecomputeReason.PEER_DEAD, 2.0, 0))


@pytest.mark.parametrize(("arrived", "fails_at"), [(0, 2.0), (20 * MIB, 3.0), (100 * MIB, 7.0)])
def test_a_read_must_keep_the_least_bandwidth(arrived: int, fails_at: float) -> None:
    """A pull stalls for at most the floor: its deadline moves on only with the bytes that arrive."""
    flow = make_reading(1000 * MIB, transfer_floor_s=2.0, transfer_min_bytes_per_s=20.0 * MIB)
    flow.handle(BytesArrived(arrived), 0.5)
    log = run_until(flow, 100.0, answer=True)
    assert log[-2:] == [(fails_at, SendFailed(log[-2][1].message_id, "deadline")), (fails_at, StopRead())]
    assert flow.handle(ReadStopped(), fails_at + 0.1)[-1].reason is RecomputeReason.DEADLINE


def test_a_read_at_a_trickle_ends_by_its_total_deadline() -> None:
    """1 KB/s moves the deadline by next to nothing: it trips at the floor."""
    flow = make_reading(100 * MIB, transfer_floor_s=2.0)
    for step in range(1, 25):
        now = step / 10
        flow.handle(BytesArrived(step * 100), now)
        effects = flow.handle(Tick(), now) if flow.next_wake() <= now else []
        if StopRead() in effects:
            assert now == pytest.approx(2.0, abs=0.11)
            return
    pytest.fail("the trickle was never ended")


def test_an_unanswered_release_ends_the_pull() -> None:
    """The owner dies after the last byte: void within the floor, however often it was repeated."""
    flow = make_reading(100, transfer_floor_s=2.0)
    flow.handle(ReadDone(), 1.0)
    log = run_until(flow, 100.0, answer=True, now=1.0)
    assert log[-1] == (3.0, Finished(RecomputeReason.DEADLINE, 3.0, 100))


@pytest.mark.parametrize("state", ["holding", "connecting", "queued", "reading", "validating"])
def test_the_legs_deadline_ends_every_wait(state: str) -> None:
    """Whatever the pull waits for, it ends when the leg's time is up."""
    flow = make_flow(deadline=1.0)
    flow.begin(0.0)
    flow.handle(Answered(1, "held"), 0.0)
    if state != "holding":
        flow.handle(BlocksGiven(100), 0.0)
    if state in {"queued", "reading", "validating"}:
        flow.handle(Welcomed(), 0.0)
    if state in {"reading", "validating"}:
        flow.handle(ReadStarted(), 0.0)
    if state == "validating":
        flow.handle(ReadDone(), 0.0)
    assert flow.state.value == state
    log = run_until(flow, 10.0, answer=True)
    assert log[-1][0] == 1.0
    assert flow.reason is RecomputeReason.DEADLINE


def test_only_durations_matter() -> None:
    """The same pull on clocks that are 100,000 seconds apart takes the same steps."""

    def steps(origin: float) -> list[tuple[float, FlowEffect]]:
        flow = make_flow(now=origin, deadline=origin + 600.0)
        flow.begin(origin)
        log = run_until(flow, origin + 40.0, answer=False, now=origin)
        return [(round(at - origin, 3), effect) for at, effect in log]

    assert steps(0.0) == steps(1e5) == steps(-3600.0)
