"""The pull's life is its table: every edge is taken by an event, every other pair is refused and changes nothing."""

import itertools

import pytest

from kvferry_runtime.transfer.flow import ENDS, TRANSITIONS, FlowError, FlowState, FlowStep, TransferFlow, advance
from kvferry_runtime.transfer.flow_messages import (
    Answered,
    BlocksGiven,
    BytesArrived,
    Drop,
    Finished,
    FlowEvent,
    Handshake,
    Read,
    ReadDone,
    ReadStarted,
    ReadStopped,
    Refused,
    ReleaseSent,
    SendFailed,
    SendRelease,
    SendRenew,
    StopRead,
    Tick,
    Welcomed,
)
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.limits import Limits
from tests.runtime.transfer.builders import make_flow

_S, _E = FlowState, FlowStep
PAIRS = list(itertools.product(FlowState, FlowStep))
ILLEGAL = [pair for pair in PAIRS if pair not in TRANSITIONS]
PATHS: dict[FlowState, list[FlowEvent]] = {
    _S.HOLDING: [],
    _S.LOST: [Refused(RecomputeReason.MISMATCH)],
    _S.CONNECTING: [BlocksGiven(100)],
    _S.QUEUED: [Welcomed(), BlocksGiven(100)],
    _S.READING: [Welcomed(), BlocksGiven(100), ReadStarted()],
    _S.RELEASING: [Welcomed(), BlocksGiven(100), ReadStarted(), ReleaseSent()],
    _S.FAILING: [Welcomed(), BlocksGiven(100), ReadStarted(), Answered(1, "expired")],
    _S.CANCELLING: [Welcomed(), BlocksGiven(100), ReadStarted(), Drop("gone")],
    _S.VALIDATING: [Welcomed(), BlocksGiven(100), ReadStarted(), ReadDone()],
    _S.DONE: [Welcomed(), BlocksGiven(100), ReadStarted(), ReadDone(), Answered(2, "held")],
    _S.FAILED: [BlocksGiven(100), Refused(RecomputeReason.MISMATCH)],
    _S.CANCELLED: [Drop("gone")],
}
LOCAL_STEPS: dict[FlowStep, FlowEvent] = {
    _E.BLOCKS: BlocksGiven(100),
    _E.STARTED: ReadStarted(),
    _E.RELEASE_SENT: ReleaseSent(),
    _E.ALL_READ: ReadDone(),
    _E.STOPPED: ReadStopped(),
    _E.DROP: Drop("gone"),
}


def make_flow_in(state: FlowState) -> TransferFlow:
    flow = make_flow()
    flow.begin(0.0)
    for event in PATHS[state]:
        flow.handle(event, 0.0)
    assert flow.state is state
    return flow


def events_for(state: FlowState, step: FlowStep) -> tuple[FlowEvent, float]:
    """An event that makes the step, and when."""
    if step in LOCAL_STEPS:
        return LOCAL_STEPS[step], 0.1
    if step is _E.WELCOMED:
        return Welcomed(), 0.1
    if step is _E.CONFIRMED:
        return Answered(2, "held"), 0.1
    return Tick(), 601.0  # the leg's deadline fails whatever can fail


@pytest.mark.parametrize(("state", "step"), TRANSITIONS, ids=lambda value: value.value)
def test_each_legal_edge_is_taken(state: FlowState, step: FlowStep) -> None:
    """The event goes where the table says; who was given blocks finishes once, on reaching an end."""
    flow = make_flow_in(state)
    event, now = events_for(state, step)
    effects = flow.handle(event, now)
    expected = TRANSITIONS[state, step]
    assert flow.state is expected
    had_blocks = state not in {_S.HOLDING, _S.LOST} or step is _E.BLOCKS
    finishes = expected in ENDS and had_blocks
    assert sum(isinstance(effect, Finished) for effect in effects) == finishes


@pytest.mark.parametrize(("state", "step"), ILLEGAL, ids=lambda value: value.value)
def test_each_illegal_pair_is_refused(state: FlowState, step: FlowStep) -> None:
    """A pair outside the table is an error; of the driver's events it is one that leaves the flow as it was."""
    with pytest.raises(FlowError, match=state.value):
        advance(state, step)
    if step in LOCAL_STEPS:
        flow = make_flow_in(state)
        before = repr(flow)
        with pytest.raises(FlowError):
            flow.handle(LOCAL_STEPS[step], 0.1)
        assert repr(flow) == before


@pytest.mark.parametrize("state", FlowState, ids=lambda state: state.value)
def test_late_words_from_the_network_are_no_error(state: FlowState) -> None:
    """Welcomes, answers with foreign ids and progress may come in any state; an end stays an end."""
    flow = make_flow_in(state)
    for event in (Welcomed(), Answered(77, "held"), Answered(78, "unknown"), BytesArrived(3), Tick()):
        flow.handle(event, 0.0)
    if state in ENDS | {_S.LOST}:
        assert flow.state is state
        flow.handle(Refused(RecomputeReason.MISMATCH), 0.0)
        flow.handle(Answered(1, "expired"), 0.0)
        assert flow.state is state


def test_a_good_pull_step_by_step() -> None:
    """Hold, welcome, blocks, read, release, confirmed: the effects in order, and blocks valid in the end."""
    flow = make_flow(lease_s=15.0)
    assert flow.begin(0.0) == [Handshake(), SendRenew(1)]
    assert flow.handle(Welcomed(), 0.1) == []
    assert flow.handle(Answered(1, "held"), 0.1) == []
    assert flow.handle(BlocksGiven(100), 1.0) == [Read(2)]
    assert flow.handle(ReadStarted(), 1.0) == []
    assert flow.handle(BytesArrived(60), 1.1) == []
    assert flow.handle(ReadDone(), 1.2) == [SendRelease(2)]
    assert flow.handle(Answered(2, "held"), 1.5) == [Finished(None, 0.5, 100)]
    assert repr(flow) == "TransferFlow(done, 100/100 bytes)"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("expired", RecomputeReason.LEASE_EXPIRED), ("unknown", RecomputeReason.LEASE_UNKNOWN)],
)
def test_bytes_without_a_live_lease_are_void(answer: str, reason: RecomputeReason) -> None:
    """All bytes are there, but the release is not answered ``held``: the blocks are not valid."""
    flow = make_flow_in(_S.VALIDATING)
    (finished,) = flow.handle(Answered(2, answer), 0.2)
    assert finished == Finished(reason, 0.2, 100)


@pytest.mark.parametrize("state", [_S.READING, _S.RELEASING], ids=lambda state: state.value)
def test_a_release_behind_the_last_request_saves_a_round_trip(state: FlowState) -> None:
    """The back end has the owner's answer already: ``held`` makes the blocks valid at once, all else voids them."""
    assert make_flow_in(state).handle(ReadDone("held"), 0.2) == [Finished(None, 0.2, 100)]
    assert make_flow_in(state).handle(ReadDone("expired"), 0.2) == [Finished(RecomputeReason.LEASE_EXPIRED, 0.2, 100)]
    assert make_flow_in(_S.CANCELLING).handle(ReadDone("held"), 0.2) == [Finished(RecomputeReason.CANCELLED, 0.2, 100)]


def releasing_flow(nbytes: int) -> TransferFlow:
    """All but the last byte is there, and the owner has been asked to end the lease behind it."""
    flow = make_flow(lease_s=15.0, deadline=600.0)
    flow.begin(0.0)
    for event in (Welcomed(), BlocksGiven(nbytes), ReadStarted(), ReleaseSent(), BytesArrived(nbytes - 1)):
        flow.handle(event, 0.0)
    return flow


def test_after_that_release_only_its_answer_and_the_deadlines_decide() -> None:
    """The owner may know the lease no more, though bytes are on their way: a renewal that it refuses was the last."""
    limits = Limits()
    nbytes = int(limits.transfer_min_bytes_per_s * 60)
    slow = releasing_flow(nbytes)
    assert slow.handle(Answered(1, "unknown"), 0.1) == []
    assert slow.handle(Tick(), 50.0) == []  # long after the lease's time
    assert slow.handle(ReadDone("held"), 50.0) == [Finished(None, 50.0, nbytes)]
    stuck = make_flow_in(_S.RELEASING)
    assert stuck.handle(Answered(1, "unknown"), 0.1) == []
    assert stuck.next_wake() == limits.transfer_floor_s
    assert stuck.handle(Tick(), limits.transfer_floor_s) == [SendFailed(3, "deadline"), StopRead()]
    before = make_flow_in(_S.READING)
    assert before.handle(Answered(1, "unknown"), 0.1) == [StopRead()]


def test_a_lease_whose_bytes_may_not_be_copied_yet_is_renewed() -> None:
    """The release waits at the owner behind them, and an expiry there would void all."""
    limits = Limits()
    flow = releasing_flow(int(limits.transfer_min_bytes_per_s * 60))
    assert flow.handle(Answered(1, "held"), 0.1) == []
    renewal = 15.0 * limits.renew_fraction
    assert flow.next_wake() == renewal
    assert flow.handle(Tick(), renewal) == [SendRenew(3)]
    assert flow.handle(Answered(3, "held"), renewal) == []
    assert flow.next_wake() == 2 * renewal


def test_a_drop_while_reading_waits_for_the_last_write() -> None:
    """The peer is told at once; the end comes only after the back end says that it writes no more."""
    flow = make_flow_in(_S.READING)
    assert flow.handle(Drop("client left"), 1.0) == [SendFailed(3, "client left"), StopRead()]
    assert flow.handle(Tick(), 500.0) == []
    assert flow.handle(Drop("again"), 500.0) == []
    assert flow.handle(ReadStopped(), 501.0) == [Finished(RecomputeReason.CANCELLED, 501.0, 0)]


def test_a_drop_can_lose_the_race_against_the_last_byte() -> None:
    """All bytes arrived while it was being stopped: still cancelled, still finished once."""
    flow = make_flow_in(_S.CANCELLING)
    assert flow.handle(ReadDone(), 1.0) == [Finished(RecomputeReason.CANCELLED, 1.0, 100)]


def test_a_lease_lost_before_the_blocks_is_said_with_the_blocks() -> None:
    """Nothing is finished that was not begun: the reason waits for `BlocksGiven`, or goes with `Drop`."""
    flow = make_flow_in(_S.HOLDING)
    assert flow.handle(Answered(1, "expired"), 1.0) == []
    assert flow.state is _S.LOST
    assert flow.next_wake() == float("inf")
    assert flow.handle(BlocksGiven(100), 9.0) == [Finished(RecomputeReason.LEASE_EXPIRED, 0.0, 0)]
    dropped = make_flow_in(_S.LOST)
    assert dropped.handle(Drop("gone"), 1.0) == []
