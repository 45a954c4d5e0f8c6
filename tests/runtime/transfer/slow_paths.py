"""Ways to make a transfer slow or broken on purpose: a memory that waits, and a proxy between two engines."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from kvferry_runtime.transfer.backends.tcp import TcpDescriptor
from kvferry_runtime.transfer.memory import ToyBlockMemory
from kvferry_wire.data import encode
from kvferry_wire.handle import KVHandle
from tests.runtime.transfer.builders import KV_KEY


class WaitingMemory(ToyBlockMemory):
    """Calls `wait` before each block that it shows; the owner's data plane asks once per block that it sends."""

    wait: Callable[[], None] = staticmethod(lambda: None)

    def block(self, group: int, block_id: int) -> memoryview:
        self.wait()
        return super().block(group, block_id)


class Proxy:
    """Forwards connections to a port of 127.0.0.1; bytes toward the client pass `rate` per second.

    `cut` ends all connections and refuses new ones; `hold_after` bytes toward the client the rest is kept back.
    One bit of the byte `flip_at` toward the client is changed, on each connection. While `deaf`, what clients send is
    kept and not passed on, as by a link that loses all packets of one direction.
    """

    def __init__(
        self,
        target: int,
        *,
        rate: float = float("inf"),
        hold_after: float = float("inf"),
        flip_at: int | None = None,
    ) -> None:
        self._target = target
        self._rate = rate
        self._hold_after = hold_after
        self._flip_at = flip_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._cut = False
        self._closed = False
        self.deaf = False
        self._start(self._accept)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._end(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join(5.0)

    def cut(self) -> None:
        self._cut = True
        for sock in self._sockets:
            self._end(sock)

    def restore(self) -> None:
        self._cut = False

    def _start(self, what: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=what, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self._cut or self._closed:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            self._start(self._forward, client, server, float("inf"), float("inf"), None, True)
            self._start(self._forward, server, client, self._rate, self._hold_after, self._flip_at, False)

    def _forward(
        self,
        source: socket.socket,
        target: socket.socket,
        rate: float,
        hold_after: float,
        flip_at: int | None,
        upward: bool,
    ) -> None:
        passed = 0
        size = 65536 if rate == float("inf") else max(1, int(rate / 20))
        with contextlib.suppress(OSError):  # either side has gone, or the path was cut
            while data := source.recv(size):
                data = data[: max(0, int(min(hold_after - passed, len(data))))] if hold_after < 1e18 else data
                if flip_at is not None and 0 <= flip_at - passed < len(data):
                    data = bytearray(data)
                    data[flip_at - passed] ^= 1 << flip_at % 8
                passed += len(data)
                while self.deaf and upward and not self._closed:
                    time.sleep(0.01)
                target.sendall(data)
                if rate != float("inf"):
                    time.sleep(len(data) / rate)
        self._end(source)
        self._end(target)

    def _end(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # not connected any more
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def through(proxy: Proxy, handle: KVHandle) -> KVHandle:
    """The same handle, with the proxy's port as the data port."""
    return msgspec.structs.replace(handle, backends={"tcp": encode(TcpDescriptor(proxy.port))}).signed(KV_KEY)
