"""A link's messages and payload arrive whole and in order, however the network cuts them and what is read ahead."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry_runtime.transfer.backends.tcp_link import HEAD, READ_AHEAD, Link, LinkError
from tests.runtime.transfer.builders import make_limits


@contextmanager
def pair(**limits: float) -> Iterator[tuple[Link, socket.socket]]:
    """A link and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        link = Link(listener.accept()[0], make_limits(**limits))
    with raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield link, raw
        link.close()


def buffers(sizes: list[int]) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_of_the_stream_gives_the_same_messages_and_blocks(seed: int) -> None:
    """Bytes that come one by one, many at once or across all borders are the same messages and blocks."""
    rng = random.Random(seed)
    parts: list[tuple[bytes, list[int], bytes]] = []  # message, sizes of the blocks behind it, their bytes
    for _ in range(rng.randrange(1, 12)):
        sizes = [rng.choice((1, 7, 4096, READ_AHEAD - 1, READ_AHEAD, 50_000)) for _ in range(rng.randrange(4))]
        parts.append((rng.randbytes(rng.randrange(1, 400)), sizes, rng.randbytes(sum(sizes))))
    stream = b"".join(HEAD.pack(len(message)) + message + payload for message, _, payload in parts)

    def send(raw: socket.socket) -> None:
        place = 0
        while place < len(stream):
            size = rng.choice((1, 3, 4, 100, READ_AHEAD, 70_000))
            raw.sendall(stream[place : place + size])
            place += size

    with pair() as (link, raw):
        sender = threading.Thread(target=send, args=(raw,))
        sender.start()
        for message, sizes, payload in parts:
            blocks, heard = buffers(sizes), [0]
            assert link.receive_message() == message

            def arrived(count: int, heard: list[int] = heard) -> None:
                heard[0] += count

            link.receive(blocks, arrived=arrived)
            assert b"".join(blocks) == payload
            assert heard == [len(payload)]
        sender.join()
        assert link.is_quiet()


def test_what_was_read_ahead_counts_as_here() -> None:
    """Nobody waits for bytes that the link holds already, and a link that holds some is not quiet."""
    with pair() as (link, raw):
        raw.sendall(HEAD.pack(1) + b"a" + HEAD.pack(2) + b"bc" + HEAD.pack(2) + b"d")
        assert link.receive_message() == b"a"
        assert not link.is_quiet()
        link.wait_message(0.0)  # nothing is left in the socket, and yet there is nothing to wait for
        assert link.receive_message() == b"bc"
        assert not link.is_quiet()
        raw.sendall(b"e")
        assert link.receive_message() == b"de"
        assert link.is_quiet()
        with pytest.raises(LinkError, match="idle for 0 s"):
            link.wait_message(0.0)


def test_messages_that_were_here_before_the_end_are_answered() -> None:
    """The end of the connection costs no message that came before it."""
    with pair() as (link, raw):
        raw.sendall(HEAD.pack(1) + b"a" + HEAD.pack(1) + b"b")
        raw.shutdown(socket.SHUT_WR)
        assert [link.receive_message(), link.receive_message()] == [b"a", b"b"]
        with pytest.raises(LinkError, match="closed the connection"):
            link.receive_message()


@pytest.mark.parametrize("length", [0, 2**32 - 1])
def test_a_length_that_no_message_has_is_refused_at_once(length: int) -> None:
    """Neither nothing nor four gigabytes is waited for."""
    with pair() as (link, raw):
        raw.sendall(HEAD.pack(length) + b"x" * 100)
        with pytest.raises(LinkError, match=f"a message of {length} bytes"):
            link.receive_message()


def test_a_message_that_stops_half_way_ends_in_time() -> None:
    """Half a message is waited for as long as a stalled transfer, and no longer."""
    with pair(transfer_stall_s=0.3) as (link, raw):
        raw.sendall(HEAD.pack(10) + b"half")
        with pytest.raises(LinkError, match=r"nothing moved for 0\.3 s"):
            link.receive_message()
