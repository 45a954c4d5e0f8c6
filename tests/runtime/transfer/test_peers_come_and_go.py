"""What a reader keeps of its peers: as much as there are peers alive, for as long as it uses them."""

import os
import threading

from kvferry_runtime.core.messages import DropLease, HoldLease, LegKey
from tests.runtime.transfer.builders import Engine, make_engine, make_limits, running, wait_until

PROMPT = tuple(range(32))
RESTARTS = 20
SPARE = 4  # descriptors and threads that come and go by themselves


def held_by_this_process() -> tuple[int, int]:
    """Open descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def pull_once(owner: Engine, reader: Engine) -> None:
    assert reader.pull(owner.grant(((1, 2),), PROMPT), ((5, 6),)).reason == ""
    assert reader.bytes_of(0, (5, 6)) == owner.bytes_of(0, (1, 2))


def test_twenty_lives_of_a_peer_leave_one_entry() -> None:
    """Each life at the same address makes the one before forgotten: table, sockets and threads stay as they were."""
    reader = make_engine()
    control = data = 0
    with running(reader):
        seen = []
        for life in range(RESTARTS):
            owner = make_engine(fill=True, control_port=control, data_port=data)
            control, data = owner.ports.control, owner.ports.data
            with running(owner):
                pull_once(owner, reader)
                state = reader.service.state()
                assert (state.peers, state.handshakes) == (1, life + 1)
                seen.append(held_by_this_process())
        for before, after in zip(seen[1], seen[-1], strict=True):
            assert after <= before + SPARE, seen


def test_an_idle_peer_is_forgotten_and_found_again() -> None:
    """After its time to live neither side keeps a connection; the next pull shakes hands anew."""
    owner, reader = make_engine(fill=True), make_engine(limits=make_limits(peer_ttl_s=0.4, transfer_floor_s=5.0))
    with running(owner, reader):
        pull_once(owner, reader)
        assert reader.service.state().peers == 1
        before = held_by_this_process()
        assert wait_until(lambda: reader.service.state().peers == 0, timeout=3.0)
        # The control socket and both ends of the data connection, which had a thread at the owner.
        assert wait_until(lambda: held_by_this_process()[0] <= before[0] - 3, timeout=3.0)
        assert wait_until(lambda: held_by_this_process()[1] <= before[1] - 1, timeout=3.0)
        pull_once(owner, reader)
        assert reader.service.state().handshakes == 2


def test_a_peer_whose_lease_is_held_is_no_idle_one() -> None:
    """However long the leg waits for its turn: the lease is renewed over the connection that is there."""
    owner, reader = make_engine(fill=True), make_engine(limits=make_limits(peer_ttl_s=0.3))
    with running(owner, reader):
        key = LegKey("waits", 0)
        reader.service.hold(HoldLease(key=key, handle=owner.grant(((1, 2),), PROMPT), deadline_s=20.0))
        assert wait_until(lambda: reader.service.state().peers == 1)
        assert not wait_until(lambda: reader.service.state().peers == 0, timeout=1.5)
        assert reader.service.state().handshakes == 1
        reader.service.drop(DropLease(key=key, reason="over"))
        assert wait_until(lambda: reader.service.state().peers == 0, timeout=3.0)
