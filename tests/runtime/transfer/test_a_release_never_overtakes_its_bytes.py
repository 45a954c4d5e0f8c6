"""The release goes right behind the last request: it ends the lease when all is copied, whatever the way does."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry_runtime.core.messages import HoldLease, LeaseEnded, LegKey, PullFinished, StartPull
from kvferry_runtime.transfer import control_reader
from kvferry_runtime.transfer.backends.base import BackendContext, ReadJob, ReadState, ReadStatus
from kvferry_runtime.transfer.backends.tcp import TcpBackend
from kvferry_runtime.transfer.handshake import PeerKey
from kvferry_runtime.transfer.peer_sockets import PeerSockets
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.control import Answers, ControlReply, Renew, decode_request
from kvferry_wire.control import encode as encode_control
from tests.runtime.transfer import builders
from tests.runtime.transfer.builders import make_engine, make_limits, running, wait_until
from tests.runtime.transfer.slow_paths import Proxy, WaitingMemory, through

REMOTE, LOCAL = tuple(range(1, 6)), tuple(range(10, 15))
PROMPT = tuple(range(80))


@pytest.fixture
def waiting_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's data plane can be made to wait before each block that it copies."""
    monkeypatch.setattr(builders, "ToyBlockMemory", WaitingMemory)


def on_the_data_plane(wait: Callable[[], None]) -> Callable[[], None]:
    """For the owner's threads that serve reads, not for the test's."""
    return lambda: wait() if threading.current_thread().name == "kv-data-serve" else None


class Gates:
    """Holds each of the owner's connections before its first block, until it is let through."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[threading.Thread, threading.Event] = {}

    def wait(self) -> None:
        with self._lock:
            gate = self._gates.setdefault(threading.current_thread(), threading.Event())
        gate.wait(10.0)

    def arrived(self) -> int:
        return len(self._gates)

    def open(self) -> None:
        for gate in tuple(self._gates.values()):
            gate.set()


@pytest.mark.usefixtures("waiting_memory")
def test_no_second_connection_reads_what_the_first_one_releases() -> None:
    """A kept connection breaks after its requests have left: the owner may yet take that release, so the pull ends."""
    limits = make_limits(lease_s=15.0, transfer_floor_s=10.0)
    owner, reader = make_engine(limits=limits, fill=True, checksums=False), make_engine(limits=limits)
    gates = Gates()
    with running(owner, reader), Proxy(owner.ports.data) as proxy:
        assert reader.pull(through(proxy, owner.grant((REMOTE,), PROMPT)), (LOCAL,)).reason == ""
        assert owner.next_post() == LeaseEnded(lease_id=1, why="released")
        owner.memory.wait = on_the_data_plane(gates.wait)
        handle = owner.grant((REMOTE,), PROMPT)
        reader.start_pull(through(proxy, handle), (LOCAL,))
        assert wait_until(lambda: gates.arrived() == 1)
        proxy.cut()
        proxy.restore()
        finished = reader.next_post()
        assert isinstance(finished, PullFinished)
        assert finished.reason == RecomputeReason.READ_ERROR.value
        assert gates.arrived() == 1
        gates.open()
        assert owner.next_post() in [LeaseEnded(lease_id=2, why=why) for why in ("released", "failed")]


def test_a_connection_cut_while_idle_costs_nothing() -> None:
    """It is seen before anything is sent on it; so is one on which something came that nobody asked for."""
    owner, reader = make_engine(fill=True), make_engine()
    with running(owner, reader), Proxy(owner.ports.data) as proxy:
        for _ in range(3):
            assert reader.pull(through(proxy, owner.grant((REMOTE,), PROMPT)), (LOCAL,)).reason == ""
            assert reader.bytes_of(0, LOCAL) == owner.bytes_of(0, REMOTE)
            proxy.cut()
            proxy.restore()


@pytest.mark.usefixtures("waiting_memory")
def test_an_owner_that_copies_for_longer_than_a_lease_is_still_renewed() -> None:
    """The release waits behind the copying; until then the lease lives by renewals as before."""
    limits = make_limits(lease_s=0.6, transfer_floor_s=10.0)
    owner, reader = make_engine(limits=limits, fill=True), make_engine(limits=limits)
    with running(owner, reader):
        handle = owner.grant((REMOTE,), PROMPT)
        owner.memory.wait = on_the_data_plane(lambda: time.sleep(3 * limits.lease_s / len(REMOTE)))
        assert reader.pull(handle, (LOCAL,)).reason == ""
        assert owner.next_post() == LeaseEnded(lease_id=1, why="released")


@pytest.mark.usefixtures("waiting_memory")
def test_an_owner_that_closes_keeps_its_word() -> None:
    """What a reader has asked for already is sent, and its release answered, before the connections are cut."""
    owner, reader = make_engine(fill=True), make_engine()
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        time.sleep(0.02)

    with running(reader):
        handle = owner.grant((REMOTE,), PROMPT)
        right = owner.bytes_of(0, REMOTE)
        owner.memory.wait = on_the_data_plane(wait)
        reader.start_pull(handle, (LOCAL,))
        assert begun.wait(5.0)
        owner.service.close(5.0)
        finished = reader.next_post()
        assert isinstance(finished, PullFinished)
        assert finished.reason == ""
        assert reader.bytes_of(0, LOCAL) == right


class Releasing(TcpBackend):
    """Its one read sends the release when `Overtaken` says so, and never ends by itself."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.began = self.releasing = self.stopped = False

    def read(self, peer: object, job: ReadJob) -> object:
        self.began = True
        return job

    def poll(self, handle: object) -> ReadStatus:
        state = ReadState.FAILED if self.stopped else ReadState.RUNNING
        return ReadStatus(state, 0, releasing=self.releasing)

    def stop(self, handle: object) -> None:
        self.stopped = True

    def release(self, handle: object) -> None:
        """Nothing is kept."""


class Overtaken(PeerSockets):
    """The renewal is answered ``unknown``, and the read has sent its release just before that answer came."""

    backend: Releasing
    renewal = 0  # its message id

    def send(self, peer: PeerKey, message: bytes) -> None:
        request = decode_request(message)
        if isinstance(request.body, Renew):
            self.renewal = request.id
        else:
            super().send(peer, message)

    def receive(self) -> Iterator[bytes]:
        yield from super().receive()
        if self.renewal and self.backend.began and not self.backend.releasing:
            self.backend.releasing = True
            yield encode_control(ControlReply(id=self.renewal, body=Answers(answers=("unknown",))))


def test_an_answer_from_after_the_release_is_taken_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's thread learns of the release before it believes what the owner says of the lease."""

    def make(name: str, context: BackendContext) -> Releasing:
        backend = Releasing(context)
        monkeypatch.setattr(Overtaken, "backend", backend, raising=False)
        return backend

    owner = make_engine(fill=True)
    monkeypatch.setattr(control_reader, "PeerSockets", Overtaken)
    reader = make_engine(make=make, limits=make_limits(first_renew_s=0.0, transfer_floor_s=1.0, lease_s=30.0))
    with running(owner, reader):
        handle = owner.grant((REMOTE,), PROMPT)
        key = LegKey("decode", 1)
        reader.service.hold(HoldLease(key=key, handle=handle, deadline_s=20.0))
        reader.service.pull(StartPull(key=key, handle=handle, blocks=(LOCAL,), deadline_s=20.0))
        finished = reader.next_post()
        assert isinstance(finished, PullFinished)
        assert Overtaken.backend.releasing
        assert finished.reason == RecomputeReason.DEADLINE.value
