"""What comes to the control and data ports without the key, or is no message: dropped within a second, no harm done."""

import os
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from kvferry_service import curve
from kvferry_wire.control import ControlReply, ControlRequest, Renew, decode_reply
from kvferry_wire.control import encode as encode_control
from kvferry_wire.data import NONCE_BYTES, PROOF_BYTES, ReadReply, ReadRequest, proof
from kvferry_wire.data import decode_reply as decode_read_reply
from kvferry_wire.data import encode as encode_data
from kvferry_wire.keys import derive
from tests.runtime.transfer.builders import (
    KV_KEY,
    Engine,
    make_engine,
    make_limits,
    make_ref,
    running,
    wait_until,
)

GIB = struct.pack("<I", 2**30)
DROPPED_S = 1.5  # the challenge takes 1 s; the rest is the machine's


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture(scope="module")
def owner() -> Iterator[Engine]:
    engine = make_engine(fill=True, limits=make_limits(data_connections=8))
    with running(engine):
        yield engine


@pytest.fixture(autouse=True)
def owner_is_unharmed(owner: Engine) -> Iterator[None]:
    """After each attack a fresh reader's pull is good, and memory has not grown by more than 64 MiB."""
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    reader = make_engine()
    with running(reader):
        assert reader.pull(owner.grant(((3, 4),), tuple(range(32))), ((1, 2),)).reason == ""
        assert reader.bytes_of(0, (1, 2)) == owner.bytes_of(0, (3, 4))
    assert wait_until(lambda: owner.service.state().leases == 0)
    assert process.memory_info().rss - before < 64 * 2**20


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=5.0)
    sock.settimeout(DROPPED_S)
    return sock


def seconds_until_dropped(sock: socket.socket) -> float:
    """Read until the end of the stream; a time-out is a failure."""
    began = time.monotonic()
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass  # dropped by a reset
    return time.monotonic() - began


def prove(sock: socket.socket, key: bytes = KV_KEY) -> bytes:
    """The reader's half of the challenge; returns what the owner proves."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    theirs = receive(sock, NONCE_BYTES)
    sock.sendall(nonce + proof(key, "reader", nonce, theirs))
    answer = receive(sock, PROOF_BYTES)
    assert answer == proof(key, "owner", theirs, nonce)
    return answer


def receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        assert piece, "closed"
        data += piece
    return data


def garbage(tmp_path: Path) -> dict[str, bytes]:
    return {
        "nothing": b"",
        "one byte": b"\0",
        "zeros": bytes(200),
        "random": secrets.token_bytes(4096),
        "a length of 1 GiB": GIB + b"x" * 1000,
        "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "a pickle": pickle.dumps(Canary(tmp_path / "canary")),
        "deep msgpack": b"\x91" * 100_000,
    }


@pytest.mark.parametrize("port", ["control", "data"])
def test_garbage_is_dropped_within_a_second(owner: Engine, port: str, tmp_path: Path) -> None:
    """Whatever is sent, the connection ends, no file appears, and it is counted."""
    before = owner.service.state()
    sockets = []
    for data in garbage(tmp_path).values():
        sock = connect(getattr(owner.ports, port))
        sock.sendall(data)
        sockets.append(sock)
    began = time.monotonic()
    for sock in sockets:
        with sock:
            seconds_until_dropped(sock)
    assert time.monotonic() - began < DROPPED_S
    assert not (tmp_path / "canary").exists()
    if port == "data":
        assert owner.service.state().dropped_connections >= before.dropped_connections + 7


@pytest.mark.parametrize("forgery", ["another key", "the owner's side", "a mirrored nonce", "a replay"])
def test_a_wrong_proof_opens_nothing(owner: Engine, forgery: str) -> None:
    """Another key, the proof of the other side, the owner's own nonce back, and a proof heard earlier."""
    with connect(owner.ports.data) as sock:
        theirs = receive(sock, NONCE_BYTES)
        nonce = theirs if forgery == "a mirrored nonce" else secrets.token_bytes(NONCE_BYTES)
        given = {
            "another key": lambda: proof(derive(KV_KEY, "x"), "reader", nonce, theirs),
            "the owner's side": lambda: proof(KV_KEY, "owner", nonce, theirs),
            "a mirrored nonce": lambda: proof(b"guess" * 6, "reader", nonce, theirs),
            "a replay": lambda: proof(KV_KEY, "reader", nonce, secrets.token_bytes(NONCE_BYTES)),
        }[forgery]()
        sock.sendall(nonce + given)
        assert sock.recv(1) == b"", "an unproved peer was told something"


def test_a_slow_peer_cannot_stretch_the_challenge(owner: Engine) -> None:
    """One byte now and then does not buy time."""
    with connect(owner.ports.data) as sock:
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 3.0:
                sock.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began < DROPPED_S + 0.2


def test_silent_peers_do_not_keep_readers_out(owner: Engine) -> None:
    """Far more silent connections than are kept: a reader with the key still gets in at once (see the fixture)."""
    silent = [connect(owner.ports.data) for _ in range(40)]
    reader = make_engine()
    with running(reader):
        assert reader.pull(owner.grant(((3,),), (1,)), ((1,),)).reason == ""
    for sock in silent:
        sock.close()


BAD_MESSAGES = {
    "a length of 1 GiB": GIB,
    "a length of zero": struct.pack("<I", 0),
    "more than the cap": struct.pack("<I", 4097),
    "a pickle": b"pickle",
    "not msgpack": struct.pack("<I", 3) + b"\xc1\xc1\xc1",
    "another message": struct.pack("<I", 1) + b"\xc0",
    "too few fields": struct.pack("<I", 2) + b"\x91\x01",
}


@pytest.mark.parametrize("message", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_a_proved_peer_that_speaks_nonsense_is_closed(owner: Engine, message: bytes, tmp_path: Path) -> None:
    """The key opens the port, not the memory: what is no read request ends the connection."""
    if message == b"pickle":
        body = pickle.dumps(Canary(tmp_path / "canary"))
        message = struct.pack("<I", len(body)) + body
    with connect(owner.ports.data) as sock:
        prove(sock)
        sock.sendall(message)
        assert seconds_until_dropped(sock) < 1.0
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"lease_id": 999_999}, "unknown"),
        ({"incarnation": b"x"}, "unknown"),
        ({"epoch": 7}, "unknown"),
        ({"prompt_digest": b""}, "unknown"),
        ({"group": 1}, "invalid"),
        ({"group": -1}, "invalid"),
        ({"first": 2}, "invalid"),
        ({"first": -1}, "invalid"),
        ({"count": 3}, "invalid"),
        ({"count": 10**6}, "invalid"),
        ({"count": 0}, "invalid"),
    ],
    ids=str,
)
def test_reads_outside_a_lease_are_refused_by_status(owner: Engine, changes: dict[str, object], status: str) -> None:
    """A proved peer reads exactly what a live lease holds; a refused read leaves the connection usable."""
    handle = owner.grant(((5, 6),), tuple(range(32)))
    request = ReadRequest(
        incarnation=handle.incarnation,
        epoch=handle.epoch,
        lease_id=handle.lease_id,
        prompt_digest=handle.prompt_digest,
        group=0,
        first=0,
        count=2,
    )
    with connect(owner.ports.data) as sock:
        prove(sock)
        assert ask(sock, msgspec.structs.replace(request, **changes)) == ReadReply(status, 0)
        good = ask(sock, request)
        assert good.status == "ok"
        assert receive(sock, good.nbytes) == b"".join(owner.bytes_of(0, (5, 6)))
    owner.service.withdraw(handle.lease_id)


def ask(sock: socket.socket, request: ReadRequest) -> ReadReply:
    body = encode_data(request)
    sock.sendall(struct.pack("<I", len(body)) + body)
    (length,) = struct.unpack("<I", receive(sock, 4))
    return decode_read_reply(receive(sock, length))


# ---- control port ------------------------------------------------------------------------------------------------


MakeDealer = Callable[[bytes | None], "zmq.Socket[bytes]"]


@pytest.fixture
def make_dealer(owner: Engine) -> Iterator[MakeDealer]:
    """Makes sockets to the owner, secured with a key or not at all."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def make(key: bytes | None) -> "zmq.Socket[bytes]":
        dealer = context.socket(zmq.DEALER)
        made.append(dealer)
        if key is not None:
            curve.secure_client(dealer, key)
        dealer.connect(f"tcp://127.0.0.1:{owner.ports.control}")
        return dealer

    yield make
    for dealer in made:
        dealer.close(0)
    context.term()


RENEWAL = ControlRequest(reader=b"r", id=1, body=Renew(leases=(make_ref(),)))


@pytest.mark.parametrize("key", [None, b"another key" * 2], ids=["no CURVE", "another key"])
def test_a_peer_without_the_key_hears_nothing(owner: Engine, make_dealer: MakeDealer, key: bytes | None) -> None:
    """Its requests are not even counted as messages."""
    dropped = owner.service.state().dropped_messages
    dealer = make_dealer(key)
    dealer.send(encode_control(RENEWAL))
    dealer.send(b"garbage")
    assert not dealer.poll(700)
    assert owner.service.state().dropped_messages == dropped


def test_nonsense_from_a_peer_with_the_key_is_counted_and_dropped(
    owner: Engine, make_dealer: MakeDealer, tmp_path: Path
) -> None:
    """Pickles, cut and deep messages, wrong types and extra parts get no answer; the next request does."""
    before = owner.service.state().dropped_messages
    dealer = make_dealer(KV_KEY)
    whole = encode_control(RENEWAL)
    bad = [
        b"",
        pickle.dumps(Canary(tmp_path / "canary")),
        whole[:-1],
        b"\x91" * 100_000,
        os.urandom(1000),
        msgspec.msgpack.encode({"reader": b"r", "id": "one", "body": {"type": "renew", "leases": []}}),
        msgspec.msgpack.encode({"reader": b"r", "id": 1, "body": {"type": "explode"}}),
    ]
    for message in bad:
        dealer.send(message)
    dealer.send_multipart([whole, b"extra"])
    dealer.send(whole)
    assert dealer.poll(2000)
    reply: ControlReply = decode_reply(dealer.recv())
    assert (reply.id, reply.body.answers) == (1, ("unknown",))
    assert owner.service.state().dropped_messages == before + len(bad) + 1
    assert not (tmp_path / "canary").exists()


def test_a_message_above_the_cap_ends_the_connection(owner: Engine, make_dealer: MakeDealer) -> None:
    """More than `control_message_bytes` is never buffered whole."""
    dealer = make_dealer(KV_KEY)
    dealer.send(bytes(2 * 2**20))
    assert not dealer.poll(500)


def test_a_reader_that_takes_no_answers_stops_nobody(owner: Engine, make_dealer: MakeDealer) -> None:
    """Thousands of unread answers: another reader is answered within a second meanwhile."""
    deaf = make_dealer(KV_KEY)
    deaf.setsockopt(zmq.RCVHWM, 1)
    message = encode_control(RENEWAL)
    flood = threading.Thread(target=lambda: [deaf.send(message) for _ in range(5000)], daemon=True)
    flood.start()
    other = make_dealer(KV_KEY)
    other.send(message)
    assert other.poll(1000)
    flood.join(10.0)
    assert not flood.is_alive()
