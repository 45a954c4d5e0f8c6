"""CURVE sockets: whoever lacks the service's key gets nothing, on asyncio and on synchronous sockets."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvferry_service.curve import Gate, bound_port, secure_client, secure_server
from kvferry_wire.keys import curve_secret, derive

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))


@pytest.fixture
def contexts() -> Iterator[tuple[Any, Any]]:
    """(server context, client context), both terminated afterwards."""
    server, client = zmq.asyncio.Context(), zmq.asyncio.Context()
    yield server, client
    server.term()
    client.term()


@contextmanager
def serving(contexts: tuple[Any, Any], *, gated: bool = True) -> Iterator[tuple[Any, Any, str]]:
    """Yields (server socket, client socket without options, endpoint)."""
    gate = Gate(contexts[0])
    gate.admit("state", KEY)
    if gated:
        gate.start()
    server = contexts[0].socket(zmq.ROUTER)
    client = contexts[1].socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    secure_server(server, KEY, "state")
    port = server.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield server, client, f"tcp://127.0.0.1:{port}"
    finally:
        gate.close()
        server.close(0)
        client.close(0)


async def arrives(server: Any, client: Any, seconds: float = 0.4) -> bool:
    await client.send(b"hello")
    return bool(await server.poll(int(seconds * 1000)))


async def test_a_holder_of_the_key_talks_both_ways(contexts: tuple[Any, Any]) -> None:
    """The right key gives a working socket."""
    with serving(contexts) as (server, client, endpoint):
        secure_client(client, KEY)
        client.connect(endpoint)
        assert await arrives(server, client, 3.0)
        identity, body = await server.recv_multipart()
        assert body == b"hello"
        await server.send_multipart([identity, b"welcome"])
        assert await asyncio.wait_for(client.recv(), 3) == b"welcome"


@pytest.mark.parametrize("who", ["other-key", "plain", "own-pair"])
async def test_a_stranger_gets_nothing(contexts: tuple[Any, Any], who: str) -> None:
    """Another key, the NULL mechanism, or an own client pair with the stolen server public key: all are refused."""
    with serving(contexts) as (server, client, endpoint):
        if who == "other-key":
            secure_client(client, OTHER)
        elif who == "own-pair":
            public, secret = zmq.curve_keypair()
            client.setsockopt(zmq.CURVE_PUBLICKEY, public)
            client.setsockopt(zmq.CURVE_SECRETKEY, secret)
            client.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(curve_secret(KEY, "server")))
        client.connect(endpoint)
        assert not await arrives(server, client)


async def test_without_a_gate_nobody_is_admitted(contexts: tuple[Any, Any]) -> None:
    """A missing gate closes the socket to everyone; it never opens it."""
    with serving(contexts, gated=False) as (server, client, endpoint):
        secure_client(client, KEY)
        client.connect(endpoint)
        assert not await arrives(server, client)


def test_a_context_has_one_gate() -> None:
    """A second gate in a context is an error, not a silent loss of the first."""
    context: Any = zmq.Context()
    gate = Gate(context)
    gate.start()
    with pytest.raises(RuntimeError, match="gate"):
        Gate(context).start()
    gate.close()
    gate.close()
    context.term()


def test_purposes_give_unrelated_keys() -> None:
    """Both sides of a plane have their own secret."""
    assert curve_secret(KEY, "server") != curve_secret(KEY, "client")
    assert derive(KEY, "curve-server") != KEY


class Bound:
    """A socket that says it is bound to an endpoint."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def getsockopt_string(self, option: int) -> str:
        assert option == zmq.LAST_ENDPOINT
        return self._endpoint


@pytest.mark.parametrize("port", [7, 70, 100, 20_000, 20_010, 65_530])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_bound_port_keeps_its_digits(host: str, port: int) -> None:
    """Zeros at the end of a port are part of it."""
    socket: Any = Bound(f"tcp://{host}:{port}")
    assert bound_port(socket, 0) == bound_port(socket, port) == port


def test_another_port_than_asked_for_is_refused() -> None:
    """A socket that is bound elsewhere is an error that names both."""
    socket: Any = Bound("tcp://127.0.0.1:2")
    with pytest.raises(OSError, match=r"port 20000 .*127\.0\.0\.1:2$"):
        bound_port(socket, 20_000)
