"""Two real services over loopback sockets: what was leased arrives byte for byte, and both sides come to rest."""

import itertools
import random

import pytest

from kvferry_runtime.core.messages import DropLease, HoldLease, LeaseEnded, LegKey, PullFinished, StartPull
from tests.runtime.transfer.builders import (
    FULL,
    SLIDING,
    make_engine,
    make_limits,
    make_submit,
    running,
    wait_until,
)

ORDERS = {
    "one block": ((5,), (9,)),
    "contiguous": (tuple(range(1, 41)), tuple(range(1, 41))),
    "contiguous to reversed": (tuple(range(1, 41)), tuple(range(60, 20, -1))),
    "scattered": (tuple(random.Random(1).sample(range(1, 64), 50)), tuple(random.Random(2).sample(range(1, 64), 50))),
    "a block twice": ((3, 3, 3), (1, 2, 3)),
}


@pytest.mark.parametrize(("remote", "local"), ORDERS.values(), ids=ORDERS)
def test_every_block_arrives_where_it_was_asked_to(remote: tuple[int, ...], local: tuple[int, ...]) -> None:
    """The i-th leased block lies in the i-th local one; no other local block is touched."""
    owner, reader = make_engine(fill=True), make_engine(fill=True)
    untouched = tuple(sorted(set(range(1, 64)) - set(local)))
    with running(owner, reader):
        before = reader.bytes_of(0, untouched)
        prompt = tuple(range(len(remote) * 16))
        handle = owner.grant((remote,), prompt)
        assert reader.service.check(make_submit(prompt, handle)) == ""
        finished = reader.pull(handle, (local,))
        assert finished.reason == ""
        assert finished.nbytes == len(remote) * FULL.block_bytes(16)
        assert reader.bytes_of(0, local) == owner.bytes_of(0, remote)
        assert reader.bytes_of(0, untouched) == before
        assert owner.next_post() == LeaseEnded(lease_id=1, why="released")
        assert owner.service.state().leases == 0
        assert reader.service.state().pulls == 0


def test_all_groups_are_pulled() -> None:
    """Groups of other shapes travel in one pull, in as many reads as it takes."""
    groups = (FULL, SLIDING)
    owner, reader = (make_engine(groups=groups, fill=True, limits=make_limits(read_blocks=3)) for _ in range(2))
    remote, local = ((1, 5, 9, 2), (7, 8, 3, 4)), ((11, 12, 13, 14), (21, 20, 19, 18))
    with running(owner, reader):
        assert reader.pull(owner.grant(remote, tuple(range(60))), local).reason == ""
        for group in (0, 1):
            assert reader.bytes_of(group, local[group]) == owner.bytes_of(group, remote[group])


def test_many_pulls_at_once_share_one_handshake() -> None:
    """20 concurrent pulls from one peer: one handshake, at most `transfers` reads at once, all right."""
    owner, reader = make_engine(fill=True), make_engine()
    with running(owner, reader):
        handles = [owner.grant(((n, n + 20, n + 40),), tuple(range(48))) for n in range(1, 21)]
        keys = [reader.start_pull(handle, ((n, n + 20, n + 40),)) for n, handle in enumerate(handles, 1)]
        finished = {reader.next_post() for _ in keys}
        assert {post.key for post in finished if isinstance(post, PullFinished) and not post.reason} == set(keys)
        assert reader.bytes_of(0, tuple(range(1, 61))) == owner.bytes_of(0, tuple(range(1, 61)))
        state = reader.service.state()
        assert (state.handshakes, state.peers, state.pulls_ok, state.reads) == (1, 1, 20, 0)
        assert state.pulled_bytes == owner.service.state().sent_bytes == 60 * FULL.block_bytes(16)


def test_a_queued_leg_keeps_its_lease_for_as_long_as_it_waits() -> None:
    """A hold of three lease times loses nothing; the pull after it is good."""
    limits = make_limits(lease_s=0.5)
    owner, reader = make_engine(fill=True, limits=limits), make_engine(limits=limits)
    with running(owner, reader):
        handle = owner.grant(((4,),), tuple(range(16)))
        silent = owner.grant(((5,),), tuple(range(16)))
        key = LegKey("waits", 0)
        reader.service.hold(HoldLease(key=key, handle=handle, deadline_s=20.0))
        assert wait_until(lambda: reader.service.state().holds == 1)
        assert owner.next_post() == LeaseEnded(lease_id=silent.lease_id, why="expired")
        assert not wait_until(lambda: owner.service.state().leases == 0, timeout=1.0)
        reader.service.pull(StartPull(key=key, handle=handle, blocks=((8,),), deadline_s=20.0))
        assert reader.next_post().reason == ""
        assert reader.bytes_of(0, (8,)) == owner.bytes_of(0, (4,))


def test_a_dropped_hold_frees_the_owner_at_once() -> None:
    """The leg needs no KV: the lease ends as failed long before it would expire, and nothing is finished."""
    owner, reader = make_engine(limits=make_limits(lease_s=60.0)), make_engine()
    with running(owner, reader):
        key = LegKey("cached here", 0)
        reader.service.hold(HoldLease(key=key, handle=owner.grant(((1,),), (1,)), deadline_s=20.0))
        reader.service.drop(DropLease(key=key, reason="prefix cached here"))
        assert owner.next_post(1.0) == LeaseEnded(lease_id=1, why="failed")
        assert wait_until(lambda: reader.service.state().holds == 0)
        reader.service.drop(DropLease(key=key, reason="again"))
        reader.service.drop(DropLease(key=LegKey("never held", 0), reason="again"))
        assert reader.inbox.empty()


def test_fifty_clients_leave_and_nothing_stays() -> None:
    """Holds dropped at odd moments: the owner is at rest within seconds, not at expiry."""
    owner, reader = make_engine(limits=make_limits(lease_s=60.0)), make_engine()
    with running(owner, reader):
        for number in range(50):
            key = LegKey("leaves", number)
            handle = owner.grant(((1,),), (1,))
            reader.service.hold(HoldLease(key=key, handle=handle, deadline_s=20.0))
            if number % 2:
                reader.service.pull(StartPull(key=key, handle=handle, blocks=((2,),), deadline_s=20.0))
            reader.service.drop(DropLease(key=key, reason="client left"))
        assert wait_until(lambda: owner.service.state().leases == 0)
        finished = [reader.next_post() for _ in range(25)]
        assert {post.reason for post in finished if isinstance(post, PullFinished)} <= {"cancelled", ""}
        assert wait_until(lambda: reader.service.state().pulls == 0)


def test_an_undelivered_answer_voids_the_pull() -> None:
    """The prefill answer could not be written: whoever pulls all the same hears that the lease is over."""
    owner, reader = make_engine(fill=True), make_engine()
    with running(owner, reader):
        handle = owner.grant(((1,),), (1,), answered=False)
        owner.service.answered(handle.lease_id, False)
        assert owner.next_post() == LeaseEnded(lease_id=1, why="withdrawn")
        assert reader.pull(handle, ((1,),)).reason == "lease_expired"


def test_a_reader_may_be_faster_than_the_word_that_the_answer_was_written() -> None:
    """The pull is good, and the late word changes nothing."""
    owner, reader = make_engine(fill=True), make_engine()
    with running(owner, reader):
        handle = owner.grant(((1,),), (1,), answered=False)
        assert reader.pull(handle, ((1,),)).reason == ""
        owner.service.answered(handle.lease_id, True)
        assert owner.next_post() == LeaseEnded(lease_id=1, why="released")
        assert owner.inbox.empty()


def test_the_state_tells_what_happened() -> None:
    """Counters by reason, back ends with ok, and leases by their end."""
    owner, reader = make_engine(fill=True), make_engine()
    with running(owner, reader):
        for count in itertools.repeat(1, 2):
            reader.pull(owner.grant(((1,) * count,), (1,)), ((1,) * count,))
        owner.service.withdraw(owner.grant(((1,),), (1,)).lease_id)
        state = owner.service.state()
        assert state.leases_granted == 3
        assert state.leases_ended == {"released": 2, "withdrawn": 1, "expired": 0, "failed": 0}
        assert state.backends == {"tcp": "ok"}
        assert reader.service.state().pulls_failed == {}
