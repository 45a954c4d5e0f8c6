"""A pull needs the reader's own thread for replies and time alone, and no news is lost between the threads."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry_runtime.core.messages import DropLease, HoldLease, LegKey, PullFinished, StartPull
from kvferry_runtime.transfer import control_reader
from kvferry_runtime.transfer.handshake import PeerKey
from kvferry_runtime.transfer.peer_sockets import PeerSockets
from kvferry_wire.control import Renew, decode_request
from tests.runtime.transfer.builders import Engine, make_engine, make_limits, running, wait_until

PROMPT = tuple(range(32))


class Paused(PeerSockets):
    """Keeps the reader's thread where it waits, from `hold` on until `go_on`."""

    hold = threading.Event()
    held = threading.Event()
    go_on = threading.Event()

    def poll(self, timeout_s: float) -> None:
        super().poll(timeout_s)
        if self.hold.is_set():
            self.held.set()
            assert self.go_on.wait(30.0)


class PausedBehindARenewal(Paused):
    """From the second one on, whose answer nobody hears."""

    renewals = 0

    def send(self, peer: PeerKey, message: bytes) -> None:
        super().send(peer, message)
        self.renewals += isinstance(decode_request(message).body, Renew)
        if self.renewals == 2:
            self.hold.set()


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    for event in (Paused.hold, Paused.held, Paused.go_on):
        event.clear()


@contextmanager
def paused() -> Iterator[None]:
    """While it lasts, the reader's own thread does nothing."""
    Paused.hold.set()
    assert Paused.held.wait(5.0)
    try:
        yield
    finally:
        Paused.hold.clear()
        Paused.go_on.set()


def hold(reader: Engine, owner: Engine, block: int) -> tuple[LegKey, StartPull]:
    """Hold a lease; what to pull it with."""
    handle = owner.grant(((block,),), PROMPT[:16])
    key = LegKey("decode", next(reader.leg_ids))
    reader.service.hold(HoldLease(key=key, handle=handle, deadline_s=20.0))
    return key, StartPull(key=key, handle=handle, blocks=((block,),), deadline_s=20.0)


def test_a_pull_from_a_known_peer_waits_for_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins, moves and ends while the reader's own thread does nothing."""
    owner = make_engine(fill=True)
    monkeypatch.setattr(control_reader, "PeerSockets", Paused)
    reader = make_engine(limits=make_limits(first_renew_s=10.0))
    with running(owner, reader):
        assert reader.pull(owner.grant(((1,),), PROMPT[:16]), ((1,),)).reason == ""
        with paused():
            assert reader.pull(owner.grant(((2,),), PROMPT[:16]), ((2,),)).reason == ""
            assert reader.bytes_of(0, (2,)) == owner.bytes_of(0, (2,))
            assert reader.service.state().pulls_ok == 2
        assert wait_until(lambda: owner.service.state().leases == 0)


def test_a_sleeping_thread_is_woken_for_what_is_due_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is held while the reader's thread sleeps for a minute is renewed when that is due."""
    monkeypatch.setattr(control_reader, "_IDLE_S", 60.0)
    owner, reader = make_engine(fill=True), make_engine(limits=make_limits(first_renew_s=0.2, lease_s=30.0))
    with running(owner, reader):
        assert reader.pull(owner.grant(((1,),), PROMPT[:16]), ((1,),)).reason == ""
        time.sleep(0.3)  # it sleeps for a minute now
        hold(reader, owner, 2)
        assert wait_until(lambda: owner.taken == [2])


def test_only_who_has_heard_all_answers_judges_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a renewal lies unheard past the lease's known end: a command of another leg judges nothing."""
    limits = make_limits(lease_s=4.0, first_renew_s=0.02)
    owner = make_engine(fill=True, limits=limits)
    monkeypatch.setattr(control_reader, "PeerSockets", PausedBehindARenewal)
    reader = make_engine(limits=limits)
    with running(owner, reader):
        began = time.monotonic()
        key, start = hold(reader, owner, 1)
        assert Paused.held.wait(5.0)
        renewed = time.monotonic()
        assert renewed > began + 0.5
        # The first renewal keeps it for 4 s from `began`; the owner has promised 4 s from `renewed` on.
        time.sleep(max(0.0, began + 4.15 - time.monotonic()))
        other, _ = hold(reader, owner, 2)
        reader.service.drop(DropLease(key=other, reason="not needed"))
        assert time.monotonic() < renewed + 4.0, "this machine is too slow for the test"
        Paused.go_on.set()
        reader.service.pull(start)
        finished = reader.next_post()
        assert isinstance(finished, PullFinished)
        assert (finished.key, finished.reason) == (key, "")


def test_no_command_is_lost_between_many_threads() -> None:
    """Four threads hold, pull and drop at once, each pull ends once, and nothing stays."""
    threads, each = 4, 60
    owner = make_engine(fill=True, blocks=512, limits=make_limits(lease_s=20.0))
    reader = make_engine(blocks=512)
    granted = [owner.grant(((number + 1,),), PROMPT[:16]) for number in range(threads * each)]

    def work(first: int) -> None:
        for number in range(first, first + each):
            key, handle = LegKey("decode", number), granted[number]
            reader.service.hold(HoldLease(key=key, handle=handle, deadline_s=20.0))
            reader.service.pull(StartPull(key=key, handle=handle, blocks=((number + 1,),), deadline_s=20.0))
            if number % 5 == 0:
                reader.service.drop(DropLease(key=key, reason="cancelled"))

    with running(owner, reader):
        workers = [threading.Thread(target=work, args=(index * each,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        ends = [reader.next_post() for _ in range(threads * each)]
        for worker in workers:
            worker.join()
        finished = {end.key.attempt: end.reason for end in ends if isinstance(end, PullFinished)}
        assert len(finished) == threads * each
        for number, reason in finished.items():
            assert reason == "" or (number % 5 == 0 and reason == "cancelled")
            if not reason:
                assert reader.bytes_of(0, (number + 1,)) == owner.bytes_of(0, (number + 1,))
        assert wait_until(lambda: owner.service.state().leases == 0)
        state = reader.service.state()
        assert (state.holds, state.pulls, state.reads) == (0, 0, 0)
        assert reader.inbox.empty()
