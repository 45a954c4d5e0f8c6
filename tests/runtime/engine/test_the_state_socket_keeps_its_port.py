"""The state stream's port is the one that was asked for, and the same again after a restart."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvferry_runtime.engine.state_stream import StatePublisher
from kvferry_wire.limits import Limits

KEY = bytes(range(32))


@contextmanager
def life() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    """A context of its own, as each process has: a port is free once it has ended, not when a socket is closed."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield made
    finally:
        made.term()


def free_port_ending_in_zero() -> int:
    for port in range(23_000, 32_000, 10):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # taken
            return port
    raise AssertionError("every port is taken")


def test_a_port_that_ends_in_zero_stays_over_a_restart() -> None:
    """The next life binds what the last one reported: subscribers find it again."""
    asked = port = free_port_ending_in_zero()
    for _ in range(3):
        with life() as context:
            publisher = StatePublisher(context, "127.0.0.1", port, KEY, Limits())
            port = publisher.port
            publisher.close()
        assert port == asked


def test_a_taken_port_is_an_error_that_names_it() -> None:
    """Nothing is bound elsewhere instead, and nothing stays open."""
    with life() as context, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"--state-port: .*:{port}"):
            StatePublisher(context, "127.0.0.1", port, KEY, Limits())
