"""Whatever breaks while bytes flow: the pull ends once, in time, with a reason, and nothing is written after that."""

import threading
import time
from collections.abc import Callable

import pytest

from kvferry_runtime.core.messages import DropLease, LeaseEnded, PullFinished
from kvferry_wire.handle import KVHandle
from tests.runtime.transfer import builders
from tests.runtime.transfer.builders import FULL, Engine, make_engine, make_limits, running, wait_until
from tests.runtime.transfer.owner_process import BIG, BLOCKS, owner_process, pattern
from tests.runtime.transfer.slow_paths import Proxy, WaitingMemory, through

REMOTE = tuple(range(1, 41))
LOCAL = tuple(range(50, 10, -1))
PROMPT = tuple(range(640))
LIMITS = make_limits(read_blocks=1, lease_s=30.0, connect_s=1.0)


@pytest.fixture
def slow_pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Engine]:
    """An owner that needs 10 ms for each block, and a reader that reads one block at a time."""
    monkeypatch.setattr(builders, "ToyBlockMemory", WaitingMemory)
    owner, reader = make_engine(limits=LIMITS, fill=True), make_engine(limits=LIMITS)
    monkeypatch.setattr(owner.memory, "wait", lambda: time.sleep(0.01))
    return owner, reader


def start_reading(owner: Engine, reader: Engine) -> KVHandle:
    handle = owner.grant((REMOTE,), PROMPT)
    reader.start_pull(handle, (REMOTE,))
    assert wait_until(lambda: owner.service.state().sent_bytes > 3 * FULL.block_bytes(16))
    return handle


def end_of(reader: Engine, within: float) -> PullFinished:
    began = time.monotonic()
    finished = reader.next_post(within + 1.0)
    assert isinstance(finished, PullFinished)
    assert time.monotonic() - began <= within
    return finished


def assert_nothing_is_written(reader: Engine) -> None:
    before = reader.bytes_of(0, REMOTE)
    time.sleep(0.15)
    assert reader.bytes_of(0, REMOTE) == before


def test_an_owner_that_closes_ends_the_pull(slow_pair: tuple[Engine, Engine]) -> None:
    """Within a second, as a read error: it finishes a little of what it was asked for, not two seconds of it."""
    owner, reader = slow_pair
    with running(reader):
        start_reading(owner, reader)
        owner.memory.wait = lambda: time.sleep(0.05)
        owner.service.close(5.0)
        assert end_of(reader, 1.0).reason == "read_error"
        assert_nothing_is_written(reader)
        assert wait_until(lambda: reader.service.state().pulls == 0)


def test_a_dropped_pull_ends_at_once_on_both_sides(slow_pair: tuple[Engine, Engine]) -> None:
    """The client leaves in mid-read: the reader's blocks and the owner's lease are free within half a second."""
    owner, reader = slow_pair
    with running(owner, reader):
        handle = owner.grant((REMOTE,), PROMPT)
        key = reader.start_pull(handle, (REMOTE,))
        assert wait_until(lambda: owner.service.state().sent_bytes > 0)
        reader.service.drop(DropLease(key=key, reason="client left"))
        assert end_of(reader, 0.5).reason == "cancelled"
        assert_nothing_is_written(reader)
        assert owner.next_post(0.5) == LeaseEnded(lease_id=1, why="failed")


def test_a_lease_withdrawn_in_mid_read_voids_it(slow_pair: tuple[Engine, Engine]) -> None:
    """The owner asks its table for each request: the next one is answered ``expired``."""
    owner, reader = slow_pair
    with running(owner, reader):
        handle = start_reading(owner, reader)
        owner.service.withdraw(handle.lease_id)
        assert end_of(reader, 1.0).reason == "lease_expired"


def test_a_reader_that_closes_in_mid_read_tells_the_owner(slow_pair: tuple[Engine, Engine]) -> None:
    """Its pull is posted as cancelled, and the lease ends long before it would expire."""
    owner, reader = slow_pair
    with running(owner):
        start_reading(owner, reader)
        reader.service.close(5.0)
        assert end_of(reader, 0.1).reason == "cancelled"
        assert owner.next_post(1.0) == LeaseEnded(lease_id=1, why="failed")


def test_an_owner_that_hangs_in_mid_read_costs_the_floor(slow_pair: tuple[Engine, Engine]) -> None:
    """No byte for `transfer_floor_s`: the pull ends by its deadline while renewals are still answered."""
    owner, reader = slow_pair
    go_on = threading.Event()
    with running(owner, reader):
        start_reading(owner, reader)
        owner.memory.wait = lambda: go_on.wait(10.0)
        assert end_of(reader, 2.0).reason == "deadline"
        assert_nothing_is_written(reader)
        go_on.set()
        assert owner.next_post(1.0) == LeaseEnded(lease_id=1, why="failed")
        assert reader.pull(owner.grant((REMOTE,), PROMPT), (REMOTE,)).reason == ""


def test_a_cut_network_is_used_again_after_its_repair() -> None:
    """All data connections are cut between two pulls: the kept one is replaced without a failure."""
    owner, reader = make_engine(limits=LIMITS, fill=True), make_engine(limits=LIMITS)
    with running(owner, reader), Proxy(owner.ports.data) as proxy:
        assert reader.pull(through(proxy, owner.grant((REMOTE,), PROMPT)), (REMOTE,)).reason == ""
        proxy.cut()
        assert reader.pull(through(proxy, owner.grant((REMOTE,), PROMPT)), (REMOTE,)).reason == "connect"
        proxy.restore()
        assert reader.pull(through(proxy, owner.grant((REMOTE,), PROMPT)), (REMOTE,)).reason == ""
        proxy.cut()
        proxy.restore()
        assert reader.pull(through(proxy, owner.grant((REMOTE,), PROMPT)), (REMOTE,)).reason == ""
        assert reader.service.state().handshakes == 1


@pytest.mark.parametrize(
    "make_proxy",
    [
        lambda port: Proxy(port, rate=1000.0),
        lambda port: Proxy(port, hold_after=40 * FULL.block_bytes(16)),  # just short of all, heads counted
        lambda port: Proxy(port, hold_after=0),
    ],
    ids=["1 KB/s", "stopped at the last bytes", "never a byte"],
)
def test_a_throttled_or_stopped_connection_trips_the_deadline(make_proxy: Callable[[int], Proxy]) -> None:
    """Within the floor and a little; a pull beside it from the same owner is not held up."""
    owner, reader = make_engine(limits=LIMITS, fill=True), make_engine(limits=LIMITS)
    with running(owner, reader), make_proxy(owner.ports.data) as proxy:
        throttled = reader.start_pull(through(proxy, owner.grant((REMOTE,), PROMPT)), (REMOTE,))
        beside = reader.start_pull(owner.grant(((50,),), (1,)), ((50,),))
        first, second = end_of(reader, 0.5), end_of(reader, 2.0)
        assert (first.key, first.reason) == (beside, "")
        assert second.key == throttled
        assert second.reason in {"deadline", "connect"}
        assert_nothing_is_written(reader)


def test_bytes_that_outlive_their_lease_on_a_slow_way_are_good() -> None:
    """The owner has copied all and ended the lease; the rest takes three leases' time and no renewal fails the pull."""
    limits = make_limits(lease_s=0.5, first_renew_s=0.02, transfer_min_bytes_per_s=20_000.0)
    owner, reader = make_engine(limits=limits, fill=True), make_engine(limits=limits)
    nbytes = len(REMOTE) * FULL.block_bytes(16)
    with running(owner, reader), Proxy(owner.ports.data, rate=nbytes / (3 * limits.lease_s)) as proxy:
        reader.start_pull(through(proxy, owner.grant((REMOTE,), PROMPT)), (LOCAL,))
        assert owner.next_post(limits.lease_s) == LeaseEnded(lease_id=1, why="released")
        assert reader.inbox.empty()
        assert end_of(reader, 10.0).reason == ""
        assert reader.bytes_of(0, LOCAL) == owner.bytes_of(0, REMOTE)


def test_two_processes_through_good_and_bad_times() -> None:
    """A good pull; then the owner is stopped past its lease, resumed, and killed in mid-life."""
    reader = make_engine(groups=(BIG,), blocks=BLOCKS, limits=make_limits(lease_s=1.0))
    remote, local = tuple(range(1, 101)), tuple(range(110, 10, -1))
    with running(reader), owner_process(lease_s=1.0) as owner:
        assert reader.pull(owner.grant(remote), (local,)).reason == ""
        assert all(reader.memory.block(0, to) == pattern(of) for of, to in zip(remote, local, strict=True))

        handle = owner.grant(remote)
        owner.stop()
        reader.start_pull(handle, (local,))
        assert end_of(reader, 2.5).reason in {"deadline", "peer_dead"}
        time.sleep(0.5)
        owner.resume()
        assert wait_until(lambda: owner.leases() == 0)
        assert reader.pull(handle, (local,)).reason in {"lease_expired", "lease_unknown"}
        assert reader.pull(owner.grant(remote), (local,)).reason == ""

        reader.start_pull(owner.grant(remote), (local,))
        owner.kill()
        assert end_of(reader, 2.5).reason in {"", "read_error", "connect", "deadline", "peer_dead"}
        assert_nothing_is_written(reader)
