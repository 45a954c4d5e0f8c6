"""The election: expiry by one's own clock, fences that close before anybody else may write, in any schedule."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from kvferry_operator.shell.election import Election, LeaseRecord, LeaseTimes, Over, Read, Sleep, Write

TIMES = LeaseTimes(duration_s=15.0, renew_deadline_s=10.0, retry_s=2.0)


@dataclass
class Server:
    """A Lease on an API server: a write must name the version that is there."""

    record: LeaseRecord | None = None
    version: int = 0
    holders: list[str] = field(default_factory=list)

    def write(self, record: LeaseRecord) -> LeaseRecord | None:
        there = "" if self.record is None else self.record.version
        if record.version != there:
            return None
        self.version += 1
        self.record = msgspec.structs.replace(record, version=str(self.version))
        self.holders.append(record.holder)
        return self.record


def turn(election: Election, server: Server, now: float, *, lost: bool = False, deaf: bool = False) -> object:
    """One step against the server. ``lost``: the request never arrives; ``deaf``: its answer never does."""
    step = election.step(now, f"t{now:g}")
    if isinstance(step, Read):
        election.failed(now) if lost or deaf else election.found(server.record, now)
    elif isinstance(step, Write):
        made = None if lost else server.write(step.record)
        if lost or deaf:
            election.failed(now)
        elif made is None:
            election.conflicted(now)
        else:
            election.written(made, now, now)
    return step


def lead(server: Server, name: str = "a", now: float = 0.0) -> Election:
    election = Election(name, TIMES, now)
    turn(election, server, now)
    turn(election, server, now)
    assert election.state == "leader"
    return election


def test_without_a_lease_the_first_takes_it() -> None:
    """It is made, with holder, times and no transition."""
    server = Server()
    election = lead(server)
    assert server.record == LeaseRecord(
        holder="a", duration_s=15.0, acquired="t0", renewed="t0", transitions=0, version="1"
    )
    assert election.may_write(9.9)
    assert not election.may_write(10.0)


def test_a_leader_renews_every_two_seconds_with_one_call() -> None:
    """No look before each renewal."""
    server = Server()
    election = lead(server)
    assert turn(election, server, 1.0) == Sleep(seconds=1.0)
    assert isinstance(turn(election, server, 2.0), Write)
    assert server.record is not None
    assert (server.record.renewed, server.record.acquired) == ("t2", "t0")
    assert election.holds_until == 12.0


def test_a_held_lease_is_looked_at_and_left() -> None:
    """Who waits asks every two seconds and writes nothing."""
    server = Server()
    leader = lead(server)
    other = Election("b", TIMES, 0.0)
    for now in range(0, 60, 2):
        turn(leader, server, float(now))
        assert not isinstance(turn(other, server, float(now)), Write)
    assert other.state == "candidate"
    assert not other.may_write(0.0)


def test_a_dead_holder_is_followed_after_the_leases_duration_by_our_own_clock() -> None:
    """From the last change that we saw, whatever time of day its holder wrote."""
    server = Server()
    lead(server)
    other = Election("b", TIMES, 100.0)
    now = 100.0
    turn(other, server, now)
    while other.state == "candidate":
        step = turn(other, server, now)
        now += step.seconds if isinstance(step, Sleep) else 0.0
    assert now == 115.0
    assert server.record is not None
    assert server.record.transitions == 1


def test_a_released_lease_is_taken_at_the_next_look() -> None:
    """A rollout of the operator costs two seconds, not fifteen."""
    server = Server()
    leader, other = lead(server), Election("b", TIMES, 0.0)
    turn(other, server, 1.0)
    record = leader.release(2.0, "t2")
    assert record is not None
    assert server.write(record) is not None
    assert not leader.may_write(2.0)
    assert isinstance(leader.step(3.0, ""), Over)
    for now in (3.0, 3.0):
        turn(other, server, now)
    assert other.state == "leader"


def test_a_leader_that_cannot_renew_stops_before_anybody_may_take_over() -> None:
    """Ten seconds after it sent its last successful renewal, five before others believe it dead."""
    server = Server()
    leader = lead(server)
    now = 0.0
    while leader.state == "leader":
        now += 0.5
        turn(leader, server, now, lost=True)
    assert now == 10.0
    assert leader.why == "the Lease could not be renewed for 10 s"


def test_an_answer_that_got_lost_is_found_again() -> None:
    """A renewal that was applied but not answered neither loses nor doubles leadership."""
    server = Server()
    leader = lead(server)
    turn(leader, server, 2.0, deaf=True)
    assert isinstance(turn(leader, server, 3.0), Read)
    assert isinstance(turn(leader, server, 3.0), Write)
    assert leader.holds_until == 13.0


def test_a_first_lease_whose_answer_got_lost_is_taken() -> None:
    """The candidate finds its own name in it."""
    server = Server()
    election = Election("a", TIMES, 0.0)
    turn(election, server, 0.0)
    turn(election, server, 0.0, deaf=True)
    for now in (1.0, 3.0, 3.0, 3.0):
        turn(election, server, now)
    assert election.state == "leader"


def test_a_process_that_was_paused_writes_nothing_when_it_wakes() -> None:
    """Stopped for 30 s: its fence is closed by the clock, before it has asked anybody."""
    server = Server()
    paused, other = lead(server), Election("b", TIMES, 0.0)
    now = 0.0
    while other.state == "candidate":
        turn(other, server, now)
        now += 0.5
    assert not paused.may_write(30.0)
    assert isinstance(paused.step(30.0, ""), Over)
    assert server.holders == ["a", "b"]


def test_a_lease_taken_by_another_ends_leadership_at_once() -> None:
    """Also while the fence would still be open."""
    server = Server()
    leader = lead(server)
    assert server.record is not None
    server.write(msgspec.structs.replace(server.record, holder="b"))
    turn(leader, server, 2.0)
    turn(leader, server, 2.0)
    assert (leader.state, leader.why) == ("lost", "b holds the Lease now")
    assert leader.release(2.0, "") is None


def test_somebody_elses_note_on_the_lease_is_no_loss() -> None:
    """An annotation changes the version; the leader looks and goes on."""
    server = Server()
    leader = lead(server)
    assert server.record is not None
    server.write(server.record)
    for now in (2.0, 2.0, 2.0):
        turn(leader, server, now)
    assert leader.state == "leader"
    assert leader.holds_until == 12.0


@pytest.mark.parametrize("state", ["lost", "released"])
def test_the_end_is_final(state: str) -> None:
    """No answer that arrives late brings leadership back."""
    server = Server()
    leader = lead(server)
    if state == "released":
        leader.release(1.0, "")
    else:
        leader.step(20.0, "")
    leader.written(LeaseRecord(holder="a", version="9"), 20.0, 20.0)
    leader.found(LeaseRecord(holder="a", version="9"), 20.0)
    assert leader.state == state
    assert not leader.may_write(20.0)


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_has_two_writers_at_once(seed: int) -> None:
    """Pauses, lost requests, lost answers, late candidates, clocks that start anywhere: at most one may write."""
    rng = random.Random(seed)
    server, now = Server(), 0.0
    offsets = [rng.uniform(0, 1e6) for _ in range(3)]
    elections = [Election(f"p{index}", TIMES, now + offset) for index, offset in enumerate(offsets)]
    awake = [0.0] * 3
    led = 0
    for _ in range(600):
        now += rng.choice([0.1, 0.5, 1.0, 2.0])
        index = rng.randrange(3)
        if now < awake[index]:
            continue
        if rng.random() < 0.02:
            awake[index] = now + rng.uniform(1, 40)
            continue
        mine = elections[index]
        turn(mine, server, now + offsets[index], lost=rng.random() < 0.1, deaf=rng.random() < 0.1)
        if mine.state == "lost":
            elections[index] = Election(f"p{index}-{now:g}", TIMES, now + offsets[index])
        writers = [one for one, offset in zip(elections, offsets, strict=True) if one.may_write(now + offset)]
        assert len(writers) <= 1
        led += len(writers)
    assert led > 100
