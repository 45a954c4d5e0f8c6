"""The socket between the API server and its engine: every message whole, in order, none lost, nothing waits."""

import errno
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_runtime.core.messages import AbortLeg, LeaseEnded, LegKey
from kvferry_runtime.engine import link as link_module
from kvferry_runtime.engine import messages
from kvferry_runtime.engine.link import Link, ServerGoneError
from kvferry_runtime.engine.message_socket import MessageSocket
from kvferry_runtime.engine.messages import SnapshotReply, Stop
from kvferry_wire.framing import framed
from kvferry_wire.limits import DEFAULT_LIMITS, Limits

LARGE = 2**20  # several times what the kernel keeps


def pair(limit: int = 10_000) -> tuple[MessageSocket, MessageSocket]:
    ours, theirs = socket.socketpair()
    return MessageSocket(ours, limit), MessageSocket(theirs, limit)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.binary(max_size=300), st.integers(0, LARGE).map(bytes)), max_size=8), st.data())
def test_messages_arrive_whole_and_in_order(sent: list[bytes], data: st.DataObject) -> None:
    """Whatever their sizes, and however rarely the other end looks."""
    looks = data.draw(st.lists(st.booleans(), min_size=len(sent), max_size=len(sent)))
    ours, theirs = pair()
    with closing(ours), closing(theirs):
        arrived: list[bytes] = []
        for message, look in zip(sent, looks, strict=True):
            assert ours.send(message)
            if look:
                arrived += theirs.receive()
        while ours.waiting:
            ours.flush()
            arrived += theirs.receive()
        arrived += theirs.receive()
        assert arrived == sent
        assert ours.flush()


def test_no_more_wait_than_may() -> None:
    """One that is not taken is told, and costs no other message anything."""
    ours, theirs = pair(limit=3)
    taken = [number for number in range(10) if ours.send(bytes([number]) * LARGE)]
    assert taken == [0, 1, 2]
    arrived: list[bytes] = []
    while ours.waiting:
        ours.flush()
        arrived += theirs.receive()
    assert ours.send(b"again")
    assert [message[0] for message in arrived + theirs.receive()] == [0, 1, 2, b"again"[0]]
    ours.close()
    theirs.close()


def test_what_was_sent_before_the_end_arrives() -> None:
    """The end of a process is heard behind its last word, and sending to it is an error."""
    ours, theirs = pair()
    ours.send(b"last word")
    ours.close()
    assert theirs.receive() == [b"last word"]
    theirs.receive()
    assert theirs.ended
    assert theirs.receive() == []
    for _ in range(3):  # each time, not only when it is found out
        with pytest.raises(OSError, match="Broken pipe"):
            theirs.send(b"too late")
    assert theirs.waiting == 0
    theirs.close()


def test_a_socket_that_failed_in_a_message_is_of_no_use() -> None:
    """Whatever the error: what came behind half a message would be taken for its rest."""

    class Failing(socket.socket):
        fails = False

        def send(self, data: Any, flags: int = 0) -> int:
            if self.fails:
                raise OSError(errno.ENOBUFS, "No buffer space available")
            return super().send(data, flags)

    ours, theirs = socket.socketpair()
    failing = Failing(fileno=ours.detach())
    sender, reader = MessageSocket(failing, 10), MessageSocket(theirs, 10)
    assert sender.send(bytes(LARGE))
    failing.fails = True
    with pytest.raises(OSError, match="No buffer space"):
        sender.flush()
    failing.fails = False
    with pytest.raises(OSError, match="No buffer space"):
        sender.send(b"next")
    assert reader.receive() == []
    sender.close()
    reader.close()


def test_an_end_that_left_something_unread_is_an_end() -> None:
    """The kernel calls it a reset."""
    ours, theirs = pair()
    theirs.send(b"never read")
    ours.close()
    assert theirs.receive() == []
    assert theirs.ended
    theirs.close()


def test_half_a_message_at_the_end_is_none() -> None:
    """A process that is killed in the middle of a message has not sent it."""
    ours, theirs = socket.socketpair()
    reader = MessageSocket(theirs, 1)
    ours.send(b"\x09\x00\x00\x00half")
    ours.close()
    assert reader.receive() == []
    assert reader.receive() == []
    assert reader.ended
    reader.close()


def at_most(count: int) -> Limits:
    return msgspec.structs.replace(DEFAULT_LIMITS, engine_messages=count)


@pytest.fixture
def ends() -> Iterator[tuple[Link, MessageSocket]]:
    """The engine's link, and the server's end of its socket."""
    engine, server = socket.socketpair()
    link, other = Link(engine, DEFAULT_LIMITS), MessageSocket(server, 10)
    yield link, other
    link.close()
    other.close()


def reply(nbytes: int) -> SnapshotReply:
    return SnapshotReply(number=1, snapshot=bytes(nbytes))


def test_the_inbox_holds_both_sides_news(ends: tuple[Link, MessageSocket]) -> None:
    """The transfer's events and the server's messages; and nothing a second time."""
    link, server = ends
    ended, abort = LeaseEnded(lease_id=1, why="released"), AbortLeg(key=LegKey("a", 0))
    link.post(ended)
    server.send(messages.encode(abort))
    assert link.inbox() == [ended, abort]
    assert link.inbox() == []


@pytest.mark.parametrize("news", ["message", "event", "wake"])
def test_news_of_any_kind_ends_the_wait(ends: tuple[Link, MessageSocket], news: str) -> None:
    """From another thread, while the engine's one waits."""
    link, server = ends
    tell = {
        "message": lambda: server.send(messages.encode(Stop())),
        "event": lambda: link.post(LeaseEnded(lease_id=1, why="released")),
        "wake": link.wake,
    }[news]
    timer = threading.Timer(0.05, tell)
    timer.start()
    began = time.monotonic()
    link.wait(20.0)
    assert time.monotonic() - began < 10.0
    timer.join()
    began = time.monotonic()
    link.inbox()
    link.wait(0.05)  # a wake-up is worth one wait
    assert time.monotonic() - began >= 0.05


def test_a_server_that_is_gone_is_a_stop(ends: tuple[Link, MessageSocket]) -> None:
    """Behind what it said before; and nothing can be sent to it."""
    link, server = ends
    abort = AbortLeg(key=LegKey("a", 0))
    server.send(messages.encode(abort))
    server.close()
    assert link.inbox() == [abort]
    assert link.inbox() == [Stop()]
    for _ in range(3):
        with pytest.raises(ServerGoneError, match="Broken pipe"):
            link.send(reply(1))


def receive_all(end: MessageSocket, count: int) -> list[bytes]:
    arrived: list[bytes] = []
    deadline = time.monotonic() + 20
    while len(arrived) < count and time.monotonic() < deadline:
        select.select([end], [], [], 1.0)
        arrived += end.receive()
    return arrived


def test_what_is_too_large_for_the_kernel_waits_for_no_step(ends: tuple[Link, MessageSocket]) -> None:
    """Whatever the engine's thread does meanwhile; and what it says behind it comes behind it."""
    link, server = ends
    link.send(reply(20 * LARGE))
    link.send(reply(3))
    arrived = receive_all(server, 2)  # while the link's own thread, this one, does nothing for it
    assert [messages.decode_up(message) for message in arrived] == [reply(20 * LARGE), reply(3)]


def test_a_large_message_is_one_turns(ends: tuple[Link, MessageSocket], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it is waited for as long as it comes: a long prompt does not take a step for each part."""
    monkeypatch.setattr(link_module, "_REST_MS", 20_000)
    monkeypatch.setattr(link_module, "_INBOX_S", 20.0)
    link, server = ends
    abort = AbortLeg(key=LegKey("a" * 5 * LARGE, 0))
    server.send(messages.encode(abort))

    def rest() -> None:
        while not server.flush():
            select.select([], [server], [], 1.0)

    sender = threading.Thread(target=rest)
    sender.start()
    assert link.inbox() == [abort]
    sender.join()


def test_a_message_that_stops_half_way_holds_nobody_up(
    ends: tuple[Link, MessageSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stands still in the middle of one: what else there is is not held back, and no turn waits again."""
    monkeypatch.setattr(link_module, "_REST_MS", 50)
    link, server = ends
    server.send(messages.encode(AbortLeg(key=LegKey("a" * 5 * LARGE, 0))))
    ended = LeaseEnded(lease_id=1, why="released")
    for _ in range(3):
        link.post(ended)
        assert link.inbox() == [ended]
    began = time.monotonic()
    for _ in range(100):
        assert link.inbox() == []
    assert time.monotonic() - began < 2.5  # not 50 ms each


def test_a_message_that_trickles_takes_no_turn_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part, each in time: the turn goes on all the same, and hears what the transfer told meanwhile."""
    monkeypatch.setattr(link_module, "_REST_MS", 1000)
    engine, server = socket.socketpair()
    link = Link(engine, DEFAULT_LIMITS)
    data = framed(messages.encode(AbortLeg(key=LegKey("a" * 100, 0))))
    over = threading.Event()

    def trickle() -> None:
        for place in range(len(data)):
            server.send(data[place : place + 1])
            if over.wait(0.2):
                server.sendall(data[place + 1 :])
                return

    sender = threading.Thread(target=trickle)
    sender.start()
    ended = LeaseEnded(lease_id=1, why="released")
    wake = threading.Timer(0.1, link.post, [ended])
    wake.start()
    found: list[object] = []
    while not found:  # some turns: the first parts may not be here yet
        found += link.inbox()
    over.set()
    sender.join()
    wake.join()
    assert found == [ended]
    assert link.inbox() == [AbortLeg(key=LegKey("a" * 100, 0))]
    link.close()
    server.close()


def test_a_server_that_takes_nothing_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many messages as may wait, and then as long as an answer may be late."""
    monkeypatch.setattr(link_module, "_BLOCKED_S", 0.2)
    engine, server = socket.socketpair()
    link = Link(engine, at_most(2))
    link.send(reply(LARGE))
    link.send(reply(LARGE))
    began = time.monotonic()
    with pytest.raises(ServerGoneError, match="taken nothing for"):
        link.send(reply(LARGE))
    assert time.monotonic() - began >= 0.2
    link.close(0.0)
    server.close()


def test_a_full_server_that_makes_room_is_waited_for() -> None:
    """A message above the limit leaves as soon as one before it has."""
    engine, server = socket.socketpair()
    link, other = Link(engine, at_most(1)), MessageSocket(server, 1)
    link.send(reply(LARGE))
    arrived: list[bytes] = []
    reader = threading.Thread(target=lambda: arrived.extend(receive_all(other, 2)))
    reader.start()
    link.send(reply(5))
    reader.join(20.0)
    assert [messages.decode_up(message) for message in arrived] == [reply(LARGE), reply(5)]
    link.close()
    other.close()


def test_what_was_said_last_is_given_time_to_leave() -> None:
    """An engine that cannot start says why before it ends, however long that is."""
    engine, server = socket.socketpair()
    link, other = Link(engine, DEFAULT_LIMITS), MessageSocket(server, 1)
    link.send(reply(LARGE))
    arrived: list[bytes] = []

    def read() -> None:
        time.sleep(0.05)
        while not other.ended:
            select.select([other], [], [], 10.0)
            arrived.extend(other.receive())

    reader = threading.Thread(target=read)
    reader.start()
    link.close(linger_s=10.0)
    reader.join(10.0)
    assert len(arrived) == 1
    other.close()
