"""Random schedules of loss, repetition, delay and disorder: one pull against the real lease table.

Invariants: a flow that was given blocks finishes exactly once; never while the back end may still write; valid only if
the lease was live from the first byte to the last; and it ends in bounded time. The lease ends exactly once.
"""

import heapq
import itertools
import random

import pytest

from kvferry_runtime.core.messages import LeaseEnded
from kvferry_runtime.transfer.flow import TransferFlow
from kvferry_runtime.transfer.flow_messages import (
    Answered,
    BlocksGiven,
    Drop,
    Finished,
    FlowEffect,
    Handshake,
    Read,
    ReadDone,
    ReadStarted,
    ReadStopped,
    ReleaseSent,
    SendFailed,
    SendRelease,
    SendRenew,
    StopRead,
    Tick,
    Welcomed,
)
from tests.runtime.transfer.builders import READER, make_flow, make_grant, make_ref, make_table

LEASE_S = 3.0


class BadNetwork:
    """One reader, one owner and what is between them, driven by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.loss = self.rng.choice([0.0, 0.2, 0.6])
        self.delay = self.rng.choice([0.01, 0.3, 2.0])
        self.now = 0.0
        self.order = itertools.count()
        self.queue: list[tuple[float, int, object, object]] = []
        self.table = make_table(lease_s=LEASE_S)
        self.table.grant(make_grant(), 0.0)
        self.table.answered(1, True, 0.0)
        self.flow: TransferFlow = make_flow(lease_s=LEASE_S, deadline=30.0, transfer_floor_s=2.0, control_reply_s=0.5)
        self.ended: list[LeaseEnded] = []
        self.ended_at = float("inf")
        self.finished: list[Finished] = []
        self.given = False
        self.may_write = False
        self.read_began = float("inf")
        self.read_ended = float("inf")
        self.release_id = 0
        self.released_behind = 0

    def at(self, when: float, what: object, argument: object = None) -> None:
        heapq.heappush(self.queue, (when, next(self.order), what, argument))

    def send(self, what: object, argument: object) -> None:
        """Over the network: lost, late, up to three times, in any order."""
        for _ in range(self.rng.choices((1, 2, 3), (7, 2, 1))[0]):
            if self.rng.random() >= self.loss:
                self.at(self.now + self.rng.random() * self.delay, what, argument)

    def perform(self, effects: list[FlowEffect]) -> None:
        for effect in effects:
            match effect:
                case Handshake():
                    self.at(self.now + self.rng.random() * self.delay * 2, self.feed, Welcomed())
                case SendRenew() | SendRelease() | SendFailed():
                    self.send(self.serve, effect)
                case Read(release_id):
                    self.release_id = release_id
                    self.at(self.now + self.rng.random() * 0.5, self.begin_read)
                case StopRead():
                    self.at(self.now + self.rng.random() * 0.3, self.end_read, "stopped")
                case Finished():
                    assert not self.may_write, "finished while the back end may write"
                    self.finished.append(effect)

    def feed(self, event: object) -> None:
        self.perform(self.flow.handle(event, self.now))

    def give_blocks(self, _: object) -> None:
        if not self.flow.ended:
            self.given = True
            self.feed(BlocksGiven(1000))

    def drop(self, _: object) -> None:
        if not self.flow.ended:
            self.feed(Drop("client left"))

    def withdraw(self, _: object) -> None:
        self.table.withdraw(1, self.now)

    def begin_read(self, _: object) -> None:
        if self.flow.state.value == "queued":
            self.may_write, self.read_began = True, self.now
            self.feed(ReadStarted())
            how = "broken" if self.rng.random() < 0.2 else "done"
            self.at(self.now + self.rng.random() * self.rng.choice([0.1, 1.5, 6.0]), self.end_read, how)

    def end_read(self, how: object) -> None:
        waiting = self.flow.state.value in {"failing", "cancelling"}
        if not self.may_write:
            if how == "stopped" and waiting:
                self.feed(ReadStopped())
            return
        if how == "done" and self.rng.random() < 0.5:
            self.release_behind(None)
            return
        self.may_write, self.read_ended = False, self.now
        self.feed(ReadDone() if how == "done" else ReadStopped())

    def release_behind(self, _: object) -> None:
        """The owner has copied the last byte and takes the release; that is lost, or its answer, or none."""
        self.feed(ReleaseSent())
        self.read_ended = self.now
        answer = None
        if self.rng.random() < 0.8:
            self.released_behind += 1
            answer = self.table.release(make_ref(), READER, self.release_id, self.now)
        if self.rng.random() < 0.3:
            answer = None
        self.at(self.now + self.rng.random() * self.rng.choice([0.01, 0.5, 2.5]), self.done_behind, answer)

    def done_behind(self, answer: object) -> None:
        if self.may_write:
            self.may_write = False
            self.feed(ReadDone(answer))

    def serve(self, effect: object) -> None:
        match effect:
            case SendRenew(message_id):
                answer = self.table.renew(make_ref(), self.now)
            case SendRelease(message_id):
                answer = self.table.release(make_ref(), READER, message_id, self.now)
            case _:
                self.table.failed(make_ref(), self.now)
                return
        self.send(self.feed, Answered(message_id, answer))

    def judge(self) -> None:
        ended = self.table.tick(self.now)
        if ended:
            self.ended += ended
            self.ended_at = self.now

    def run(self) -> None:
        self.perform(self.flow.begin(0.0))
        self.at(self.rng.random() * self.rng.choice([0.1, 10.0]), self.give_blocks)
        if self.rng.random() < 0.25:
            self.at(self.rng.random() * 12.0, self.drop)
        if self.rng.random() < 0.2:
            self.at(self.rng.random() * 12.0, self.withdraw)
        while self.now < 60.0:
            wake = self.flow.next_wake()
            next_event = self.queue[0][0] if self.queue else float("inf")
            tick = self.now + 0.1
            self.now = max(self.now, min(wake, next_event, tick))
            if next_event <= self.now:
                _, _, what, argument = heapq.heappop(self.queue)
                what(argument)
            elif wake <= self.now:
                self.feed(Tick())
            self.judge()
            self.table.check_integrity()


@pytest.mark.parametrize("first_seed", range(0, 400, 100))
def test_every_schedule_keeps_the_invariants(first_seed: int) -> None:
    """100 schedules each; a failing one prints its seed."""
    for seed in range(first_seed, first_seed + 100):
        network = BadNetwork(seed)
        network.run()
        story = f"seed {seed}: {network.flow!r} {network.table!r} {network.finished}"
        assert len(network.finished) == network.given, story
        assert [end.lease_id for end in network.ended] == [1], story
        for finished in network.finished:
            if finished.reason is None:
                assert network.ended[0].why == "released", story
                assert network.read_ended <= network.ended_at, story


def test_good_and_bad_ends_both_occur() -> None:
    """The schedules above are no vacuous ones: pulls succeed, fail for several reasons, and are cancelled."""
    reasons = set()
    behind = 0
    for seed in range(200):
        network = BadNetwork(seed)
        network.run()
        behind += network.released_behind
        reasons |= {finished.reason and finished.reason.value for finished in network.finished}
    assert {None, "cancelled", "read_error", "deadline", "lease_expired"} <= reasons
    assert behind > 20
