"""The in-process back end behaves like the others, one block per poll, and services run over it."""

import pytest

from kvferry_runtime.transfer.backends.base import BackendContext, BackendError, ReadJob, ReadState, TransferBackend
from kvferry_runtime.transfer.backends.loopback import LoopbackBackend, LoopbackHub
from kvferry_runtime.transfer.lease import LeaseTable
from kvferry_runtime.transfer.memory import ToyBlockMemory
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import LeaseRef
from tests.runtime.transfer.builders import FULL, READER, make_engine, make_grant, make_ref, make_table, running


def make_pair(table: LeaseTable) -> tuple[LoopbackHub, LoopbackBackend, LoopbackBackend]:
    hub = LoopbackHub()
    owner = LoopbackBackend(hub, b"owner", table.lookup)
    reader = LoopbackBackend(hub, b"reader", make_table().lookup)
    for number, backend in enumerate((owner, reader), 1):
        memory = ToyBlockMemory((FULL,), 16, 8)
        for block_id in range(1, 8):
            memory.block(0, block_id)[:] = bytes((number * 16 + block_id,)) * FULL.block_bytes(16)
        backend.register(memory, memory.layout())
        backend.start()
    return hub, owner, reader


def read(reader: LoopbackBackend, lease: LeaseRef) -> object:
    return reader.read(reader.connect(b"", "", b"owner"), ReadJob(lease, ((5, 6),)))


def test_each_poll_copies_one_block() -> None:
    """So that a test decides what happens in between."""
    table = make_table()
    table.grant(make_grant(), 0.0)
    _, owner, reader = make_pair(table)
    handle = read(reader, make_ref())
    assert reader.memory.block(0, 5)[0] == 37
    assert reader.poll(handle).state is ReadState.RUNNING
    assert (reader.memory.block(0, 5)[0], reader.memory.block(0, 6)[0]) == (17, 38)
    assert reader.poll(handle).state is ReadState.DONE
    assert reader.memory.block(0, 6)[0] == 18
    assert owner.sent_bytes() == 2 * FULL.block_bytes(16)


def test_a_lease_that_ends_in_between_ends_the_read() -> None:
    """As over a network: the owner asks its table for every block."""
    table = make_table()
    table.grant(make_grant(), 0.0)
    _, _, reader = make_pair(table)
    handle = read(reader, make_ref())
    reader.poll(handle)
    table.release(make_ref(), READER, 1, 0.0)
    status = reader.poll(handle)
    assert (status.state, status.reason) == (ReadState.FAILED, RecomputeReason.LEASE_UNKNOWN)
    assert reader.memory.block(0, 6)[0] == 38


def test_a_cut_and_a_stop_end_the_read() -> None:
    """Cut before the first block it could not connect, later it broke off; a stopped read writes no more."""
    table = make_table()
    table.grant(make_grant(), 0.0)
    hub, owner, reader = make_pair(table)
    first, second, third = (read(reader, make_ref()) for _ in range(3))
    reader.poll(second)
    hub.cut.add(b"owner")
    assert reader.poll(first).reason is RecomputeReason.CONNECT
    assert reader.poll(second).reason is RecomputeReason.READ_ERROR
    hub.cut.clear()
    reader.stop(third)
    assert reader.poll(third).state is ReadState.FAILED
    owner.close(0.0)
    assert reader.poll(read(reader, make_ref())).reason is RecomputeReason.CONNECT
    with pytest.raises(BackendError):
        reader.connect(b"", "", b"")


def test_services_run_over_it() -> None:
    """Handshake, leases and validation are above the back end: a pull works the same."""
    hub = LoopbackHub()
    names = iter((b"one", b"two"))

    def make(name: str, context: BackendContext) -> TransferBackend:
        return hub.backend(next(names))(context)

    owner, reader = (make_engine(make=make, backends=("loopback",), fill=True) for _ in range(2))
    with running(owner, reader):
        remote, local = tuple(range(1, 41)), tuple(range(60, 20, -1))
        assert reader.pull(owner.grant((remote,), tuple(range(640))), (local,)).reason == ""
        assert reader.bytes_of(0, local) == owner.bytes_of(0, remote)
