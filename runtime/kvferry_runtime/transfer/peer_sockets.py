"""The reader's control sockets: one DEALER per peer, opened by the first message to it. Used by one thread."""

import logging
import math
from collections.abc import Iterator

import zmq

from kvferry_runtime.transfer.handshake import PeerKey
from kvferry_service import curve
from kvferry_wire.limits import Limits

_log = logging.getLogger(__name__)

_REPLIES = 1000  # of one peer, taken in one round
_LINGER_MS = 200  # at close, for messages that were just sent


class PeerSockets:
    """Sends never block: what finds no room is lost, and sent again by whoever waits for its answer."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", kv_key: bytes, limits: Limits) -> None:
        self._context = context
        self._kv_key = kv_key
        self._limits = limits
        self._poller = zmq.Poller()
        self._sockets: dict[PeerKey, zmq.Socket[bytes]] = {}

    def watch(self, fd: int) -> None:
        """Let `poll` also return when this descriptor is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def poll(self, timeout_s: float) -> None:
        """Wait for a reply or a watched descriptor. Rounded up to a millisecond, so that a wait is never a spin."""
        self._poller.poll(math.ceil(timeout_s * 1000))

    def send(self, peer: PeerKey, message: bytes) -> None:
        """Send to a peer, if there is room."""
        try:
            known = self._sockets.get(peer) or self._open(peer)
            known.send(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # no room, or an address that is none
            _log.warning("a message to peer %s is lost: %s", peer.incarnation.hex(), error.strerror)

    def receive(self) -> Iterator[bytes]:
        """The replies that have arrived."""
        for known in tuple(self._sockets.values()):
            for _ in range(_REPLIES):
                try:
                    parts = known.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(parts) == 1:
                    yield parts[0]

    def forget(self, peer: PeerKey) -> None:
        """Close the socket to a peer."""
        known = self._sockets.pop(peer, None)
        if known is not None:
            self._poller.unregister(known)
            known.close(0)

    def close(self) -> None:
        """Close all. Messages that were just sent get a moment to leave."""
        for known in self._sockets.values():
            known.close(_LINGER_MS)
        self._sockets.clear()

    def _open(self, peer: PeerKey) -> "zmq.Socket[bytes]":
        known = self._context.socket(zmq.DEALER)
        curve.secure_client(known, self._kv_key, self._limits)
        known.setsockopt(zmq.CONNECT_TIMEOUT, int(self._limits.connect_s * 1000))
        try:
            curve.connect_tcp(known, peer.host, peer.control_port)
        except zmq.ZMQError:
            known.close(0)
            raise
        self._sockets[peer] = known
        self._poller.register(known, zmq.POLLIN)
        return known
