"""After `close` there is no thread, no socket and no unfinished pull; start-up that fails leaves nothing either."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry_runtime.core.messages import HoldLease, LeaseEnded, LegKey, PullFinished
from kvferry_runtime.transfer.config import TransferConfig, TransferError
from kvferry_runtime.transfer.service import TransferService
from kvferry_wire.keys import ServiceKeys
from tests.runtime.transfer.builders import KEYS, make_engine, running, wait_until


@pytest.fixture(autouse=True)
def no_thread_is_left(open_files: set[str]) -> Iterator[None]:
    """Every test of this file compares threads and sockets before and after."""
    before = set(threading.enumerate())
    yield
    assert wait_until(lambda: set(threading.enumerate()) <= before), set(threading.enumerate()) - before


def test_a_used_pair_closes_whole() -> None:
    """Threads and sockets of both sides are gone, and closing again is no error."""
    owner, reader = make_engine(fill=True), make_engine()
    with running(owner, reader):
        for number in range(5):
            assert reader.pull(owner.grant(((1, 2),), tuple(range(32))), ((3, 4),)).reason == "", number
    owner.service.close(1.0)
    reader.service.close(1.0)


def test_close_finishes_every_pull_and_ends_every_lease() -> None:
    """Pulls to a peer that does not answer are cancelled; held leases are withdrawn; each is posted once."""
    owner, reader = make_engine(), make_engine()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        handle = owner.grant(((1,),), (1,))
        deaf_handle = type(handle)(
            **{name: getattr(handle, name) for name in handle.__struct_fields__}
            | {"control_port": deaf.getsockname()[1]}
        )
        keys = {reader.start_pull(deaf_handle, ((1,),)) for _ in range(3)}
        reader.service.hold(HoldLease(key=LegKey("held", 0), handle=deaf_handle, deadline_s=10.0))
        reader.service.close(5.0)
        owner.service.close(5.0)
    finished = [reader.inbox.get_nowait() for _ in range(3)]
    assert {post.key for post in finished if isinstance(post, PullFinished)} == keys
    assert {post.reason for post in finished if isinstance(post, PullFinished)} == {"cancelled"}
    assert reader.inbox.empty()
    assert owner.inbox.get_nowait() == LeaseEnded(lease_id=1, why="withdrawn")
    assert owner.inbox.empty()


@pytest.mark.parametrize("port", ["control_port", "data_port"])
def test_a_taken_port_is_said_and_leaves_nothing(port: str) -> None:
    """The error names the port that cannot be bound."""
    message = f"{port.removesuffix('_port')} port: cannot listen on 127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(TransferError, match=message):
        make_engine(**{port: taken.getsockname()[1]})


def test_a_service_without_the_kv_key_or_a_back_end_does_not_start() -> None:
    """The message names what is missing, and which back ends are known."""
    router_keys = ServiceKeys(http=KEYS.http, state=KEYS.state, hash=KEYS.hash)
    with pytest.raises(TransferError, match="kv"):
        make_engine(keys=router_keys)
    with pytest.raises(TransferError, match=r"'warp' given; accepted here: .*tcp"):
        make_engine(backends=("warp",))


def test_one_back_end_that_works_is_enough() -> None:
    """What is not available is told with its reason."""
    engine = make_engine(backends=("warp", "tcp"))
    with running(engine):
        backends = engine.service.state().backends
        assert backends["tcp"] == "ok"
        assert "warp" in backends["warp"]


def test_what_needs_a_running_service_says_so() -> None:
    """Before `start` there is nothing to hold a lease with."""
    engine = make_engine()
    engine.service.close(5.0)
    idle = TransferService(config=engine.config, keys=KEYS, memory=engine.memory, post=engine.inbox.put)
    assert isinstance(engine.config, TransferConfig)
    with pytest.raises(TransferError, match="not started"):
        idle.state()
    idle.close(1.0)


def test_a_dead_thread_is_told_and_closes_whole() -> None:
    """An engine that breaks the contract (the same leg held twice) stops the pull thread: `check_alive` says so."""
    owner, reader = make_engine(), make_engine()
    with running(owner):
        handle = owner.grant(((1,),), (1,))
        reader.service.check_alive()
        for _ in range(2):
            reader.service.hold(HoldLease(key=LegKey("twice", 0), handle=handle, deadline_s=10.0))

        def is_dead() -> bool:
            try:
                reader.service.check_alive()
            except TransferError as error:
                return "reader's control thread has died: ValueError: hold: " in str(error)
            return False

        assert wait_until(is_dead)
        reader.service.close(5.0)
