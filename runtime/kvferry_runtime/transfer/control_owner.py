"""The owner's side of KV control: one thread that answers readers and judges expiry, apart from the engine's loop.

It drains its socket before it judges, and judges by the time at which the round before began: after a pause of the
process, two rounds hear what had arrived meanwhile before any lease is judged by the time after the pause.
"""

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from kvferry_runtime.transfer.config import TransferError
from kvferry_runtime.transfer.desk import LeaseDesk
from kvferry_runtime.transfer.handshake import OwnSide, answer_hello
from kvferry_service import curve
from kvferry_wire.control import ControlReply, ControlRequest, Hello, decode_request, encode
from kvferry_wire.limits import Limits

_log = logging.getLogger(__name__)

_TICK_S = 0.05  # between two judgements, at most
_DRAIN = 10_000  # messages answered between two judgements, at most


class OwnerControl:
    """Listens on the control port.

    Args:
        context: of the service; its gate admits readers.
        own: what this engine says of itself now.
        desk: the leases.
    """

    def __init__(
        self,
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
        kv_key: bytes,
        host: str,
        port: int,
        own: Callable[[], OwnSide],
        desk: LeaseDesk,
        limits: Limits,
    ) -> None:
        self._own = own
        self._desk = desk
        self._limits = limits
        self._closing = threading.Event()
        self.dropped = 0
        self.failure = ""
        self._socket = context.socket(zmq.ROUTER)
        curve.secure_server(self._socket, kv_key, "kv", limits)
        try:
            self.port = curve.bind_tcp(self._socket, host, port)
        except OSError:
            self._socket.close(0)
            raise
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise TransferError(f"control port: cannot listen on {host}:{port}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="kv-control-owner", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Answer no more. False if the thread did not end in time."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        else:
            self._socket.close(0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - kept, and raised by `check_integrity`
            self.failure = f"{type(error).__name__}: {error}"
            _log.exception("the lease control thread has died")
        finally:
            self._socket.close(0)

    def _loop(self) -> None:
        judged_by = time.monotonic()
        while not self._closing.is_set():
            before = time.monotonic()
            self._socket.poll(int(self._tick_s() * 1000))
            self._drain()
            self._desk.judge_expiry(judged_by)
            judged_by = before

    def _tick_s(self) -> float:
        return min(_TICK_S, self._limits.lease_s / 20)

    def _drain(self) -> None:
        for _ in range(_DRAIN):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = self._answer(parts)
            if reply is None:
                continue
            try:
                self._socket.send_multipart([parts[0], reply], zmq.NOBLOCK)
            except zmq.Again:  # the reader takes no answers: it asks again, with the same id
                self._drop("a reader's queue is full")

    def _answer(self, parts: list[bytes]) -> bytes | None:
        if len(parts) != 2:
            self._drop(f"a message of {len(parts)} parts")
            return None
        try:
            request: ControlRequest = decode_request(parts[1])
        except msgspec.DecodeError as error:
            self._drop(f"not a control request: {error}")
            return None
        body = request.body
        if isinstance(body, Hello):
            verdict = answer_hello(body, self._own())
            return encode(ControlReply(id=request.id, body=verdict))
        return encode(ControlReply(id=request.id, body=self._desk.serve(request.reader, request.id, body)))

    def _drop(self, why: str) -> None:
        self.dropped += 1
        _log.warning("control message dropped: %s", why)
