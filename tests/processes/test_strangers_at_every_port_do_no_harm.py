"""Every port on which a service listens: declared, on its own address alone, and deaf to whatever is no request."""

import asyncio
import pickle
import secrets
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
import zmq
import zmq.asyncio

from kvferry_service import curve
from kvferry_service.key_files import load_keys
from kvferry_wire import state as wire_state
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.processes.asking import Ask, ask_for, judge
from tests.processes.test_bad_input_is_refused_by_name import _same_life as same_life
from tests.processes.traffic import Traffic
from tests.support.service import ENGINE_PODS, Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
__all__ = ["same_life"]  # no bomb ends a process or an engine's life, and good input is answered after it

MIB = 2**20
GROWTH = 64 * MIB
DROPPED_S = DEFAULT_LIMITS.challenge_s  # of the KV and state ports
BUSY_S = 2.0  # what a machine with other work adds
SUBSCRIBERS = 50


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def post(path: str, header: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n\r\n".encode()


def bombs(canary: Path) -> dict[str, bytes]:
    pickled = pickle.dumps(Canary(canary))
    return {
        "nothing": b"",
        "a byte": b"\0",
        "zeros": bytes(4096),
        "random": secrets.token_bytes(65536),
        "a pickle": pickled,
        "a pickle behind its length": struct.pack("<I", len(pickled)) + pickled,
        "a length of 1 GiB": struct.pack("<I", 2**30) + bytes(64 * 1024),
        "a length of 1 GiB, big-endian": struct.pack(">I", 2**30) + bytes(64 * 1024),
        "a length of 2**63": struct.pack("<Q", 2**63) + bytes(1024),
        "deep msgpack": b"\x91" * 100_000,
        "a map of 4 G entries": b"\xdf\xff\xff\xff\xff" + b"\xc0" * 1000,
        "a ZMTP greeting, NULL": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
        "half a ZMTP greeting": b"\xff" + bytes(8) + b"\x7f\x03",
        "a ZMTP frame of 1 EiB": b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47) + b"\x06" + b"\x10" + bytes(7),
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        "half a request": post("/internal/v1/generate", "Content-Le")[:-4],
        "a pickle as a leg": post("/internal/v1/generate", f"Content-Length: {len(pickled)}") + pickled,
        "a body of 1 EiB": post("/v1/completions", f"Content-Length: {2**60}"),
        "a chunk of 1 EiB": post("/v1/completions", "Transfer-Encoding: chunked") + b"1000000000000000\r\n",
    }


def processes(service: Service) -> list[psutil.Process]:
    pids = {pid for pid in service.pids().values() if pid is not None}
    return [psutil.Process(pid) for pid in sorted(pids | {service.record().launcher.pid})]


def listeners(service: Service) -> dict[tuple[str, int], str]:
    """Every address on which any process of the service listens, and UDP."""
    found = {}
    for process in processes(service):
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN or one.type.name == "SOCK_DGRAM":
                found[one.laddr.ip, one.laddr.port] = f"{process.pid} {one.type.name}"
    return found


async def seconds_until_closed(address: tuple[str, int], sent: bytes, wait_s: float) -> float:
    """Connect, send, and read until the other side closes."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(wait_s):
            try:
                writer.write(sent)
                while await reader.read(65536):
                    pass
            except ConnectionError:
                pass  # closed by a reset, maybe before all was sent
    finally:
        writer.transport.abort()
    return time.monotonic() - began


def memory(service: Service) -> dict[int, int]:
    return {process.pid: process.memory_info().rss for process in processes(service)}


def test_only_declared_ports_listen_on_the_loopback_address(service: Service) -> None:
    """Of all processes, the launcher included: the ports of the service's record, each once, and no UDP."""
    declared = {("127.0.0.1", number) for pod in service.record().pods for number in pod.ports.values()}
    found = listeners(service)
    assert set(found) == declared, found
    assert all(told.endswith("SOCK_STREAM") for told in found.values())


async def test_bombs_end_at_the_port(service: Service, tmp_path: Path) -> None:
    """Each at each port, all at once: the connection ends in its time, no file appears, no memory is taken."""
    before = memory(service)
    http = {pod.ports["http"] for pod in service.record().pods}
    # A request that does not come to its end keeps its connection as long as a slow client may take.
    patience = {True: DEFAULT_LIMITS.header_timeout_s + DEFAULT_LIMITS.body_timeout_s, False: DROPPED_S}
    canary = tmp_path / "canary"

    async def throw(address: tuple[str, int], name: str, sent: bytes) -> str:
        most = patience[address[1] in http] + BUSY_S
        try:
            await seconds_until_closed(address, sent, most)
        except TimeoutError:
            return f"{address}: {name} keeps its connection for more than {most:g} s"
        return ""

    kept = await asyncio.gather(
        *(throw(address, name, sent) for address in listeners(service) for name, sent in bombs(canary).items())
    )
    assert not "\n".join(told for told in kept if told)
    assert not canary.exists()
    after = memory(service)
    assert after.keys() == before.keys()
    assert not [pid for pid in after if after[pid] - before[pid] > GROWTH], (before, after)


async def test_a_key_holder_cannot_send_objects_either(
    service: Service, internal: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """With the router's own key, to each internal route that takes a body: refused, and nothing is made of it."""
    canary = tmp_path / "canary"
    for name in ENGINE_PODS:
        for route in ("generate", "prefill", "abort"):
            for sent in (pickle.dumps(Canary(canary)), b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xc1", b""):
                async with internal.post(f"{service.url(name)}/internal/v1/{route}", data=sent) as response:
                    assert 400 <= response.status < 500, (route, sent[:20], await response.text())
    assert not canary.exists()


@contextmanager
def subscribers(service: Service, count: int) -> Iterator[None]:
    """Holders of the key who listen to every engine and never read: small buffers, all full soon."""
    key = load_keys(service.state.keys, need_kv=True).state
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = []
    try:
        for number in range(count):
            socket = context.socket(zmq.SUB)
            made.append(socket)
            curve.secure_client(socket, key)
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.RCVBUF, 4096)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            pod = service.pod(ENGINE_PODS[number % len(ENGINE_PODS)])
            socket.connect(f"tcp://127.0.0.1:{pod.ports['state']}")
        yield
    finally:
        for socket in made:
            socket.close(0)
        context.term()


@pytest.fixture
async def hearing(service: Service) -> AsyncIterator[zmq.asyncio.Socket]:
    """A subscriber of the decode engine that reads."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    curve.secure_client(socket, load_keys(service.state.keys, need_kv=True).state)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(f"tcp://127.0.0.1:{service.pod('decode-0').ports['state']}")
    try:
        yield socket
    finally:
        socket.close(0)
        context.term()


async def test_fifty_deaf_subscribers_stall_nobody(service: Service, hearing: zmq.asyncio.Socket) -> None:
    """Answers stay right, the stream to whoever reads has no gap, and memory does not grow by what is not read."""
    before = memory(service)
    with subscribers(service, SUBSCRIBERS):
        messages: list[wire_state.StateMessage] = []
        ended = asyncio.Event()

        async def hear() -> None:
            while not ended.is_set():
                if await hearing.poll(100):
                    messages.append(wire_state.decode_message(await hearing.recv()))

        listening = asyncio.create_task(hear())
        async with Traffic(service, seed=45, clients=6) as traffic:
            await traffic.answered(30)
        ended.set()
        await listening
        assert not traffic.failed()
        numbers = [message.sequence for message in messages]
        assert len(numbers) > 30
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        async with aiohttp.ClientSession() as session:
            ask = Ask("Nobody waits for who does not listen. " * 3)
            answer = await ask_for(session, service.url(), ask)
        judge(ask, answer)
    after = memory(service)
    assert not [pid for pid in after if after[pid] - before[pid] > GROWTH], (before, after)


def test_this_test_would_see_a_file(tmp_path: Path) -> None:
    """The canary works: unpickled, it makes its file."""
    path = tmp_path / "canary"
    pickle.loads(pickle.dumps(Canary(path)))
    assert path.exists()
