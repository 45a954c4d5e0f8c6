"""CURVE sockets: ZMQ over TCP that admits exactly the holders of a service key.

Both key pairs of a plane are derived from one service key (``kv`` or ``state``), so whoever holds the key can be
either side, and nobody else can be any. Call ``Gate.start`` before the context's first server socket is bound: a
server socket refuses every peer while no gate runs.
"""

import threading
from typing import Literal

import zmq

from kvferry_service import logs
from kvferry_wire.keys import curve_secret, z85
from kvferry_wire.limits import DEFAULT_LIMITS, Limits

Plane = Literal["kv", "state"]

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 6000
_HANDSHAKE_MS = 5000

_log = logs.get_logger(__name__)

# Any kind of context and socket, synchronous or asyncio: only options are set on them.
AnyContext = zmq.Context[zmq.Socket[bytes]]


def zap_domain(plane: Plane) -> bytes:
    return b"kvferry-" + plane.encode()


def client_public(key: bytes) -> bytes:
    """The public key (Z85) of the plane's one admitted client identity."""
    return bytes(zmq.curve_public(curve_secret(key, "client")))


def secure_server(socket: "zmq.Socket[bytes]", key: bytes, plane: Plane, limits: Limits = DEFAULT_LIMITS) -> None:
    """Make a socket that will be bound a CURVE server that asks the context's gate about each peer."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve_secret(key, "server"))
    socket.setsockopt(zmq.ZAP_DOMAIN, zap_domain(plane))
    # Without a gate the library would admit every key: with this it admits none.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    bound_socket(socket, limits.control_message_bytes)
    # Who connects and proves nothing is closed as soon as on the data plane.
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.challenge_s * 1000))


def secure_client(socket: "zmq.Socket[bytes]", key: bytes, limits: Limits = DEFAULT_LIMITS) -> None:
    """Make a socket that will connect a CURVE client; a server without the key cannot answer it."""
    secret = curve_secret(key, "client")
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(curve_secret(key, "server")))
    bound_socket(socket, limits.control_message_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)


def bound_socket(socket: "zmq.Socket[bytes]", max_message_bytes: int, high_water: int = 1000) -> None:
    """Bounded queues and messages, no lingering at close, dead peers noticed within seconds."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def bind_tcp(socket: "zmq.Socket[bytes]", host: str, port: int) -> int:
    """Bind to an address of either family; port 0 takes a free one. Returns the port.

    Raises:
        zmq.ZMQError: the address cannot be bound.
        OSError: as ``bound_port``.
    """
    socket.bind(_tcp(socket, host, port))
    return bound_port(socket, port)


def connect_tcp(socket: "zmq.Socket[bytes]", host: str, port: int) -> None:
    """Connect to an address of either family. Raises ``zmq.ZMQError`` where it is none."""
    socket.connect(_tcp(socket, host, port))


def _tcp(socket: "zmq.Socket[bytes]", host: str, port: int) -> str:
    if ":" not in host:
        return f"tcp://{host}:{port}"
    socket.setsockopt(zmq.IPV6, 1)
    return f"tcp://[{host}]:{port}"


def bound_port(socket: "zmq.Socket[bytes]", asked: int) -> int:
    """The TCP port of a socket's last ``bind``; ``asked`` is what it was bound to, 0 for any.

    Raises:
        OSError: the socket is bound to another port than the one asked for.
    """
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    port = int(endpoint.rsplit(":", 1)[1])
    if asked not in (0, port):
        raise OSError(f"port {asked} was asked for, but the socket is bound to {endpoint}")
    return port


class Gate:
    """The ZAP handler (RFC 27) of one ZMQ context: a thread that admits one public key per plane.

    Works for synchronous and asyncio sockets of the context alike: ``Gate(zmq.asyncio.Context())`` is fine.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._admitted: dict[bytes, bytes] = {}
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._stop_endpoint = f"inproc://kvferry-gate-{id(self)}"
        self._stop: zmq.Socket[bytes] | None = None
        self._failure: str = ""
        self.refused = 0

    def admit(self, plane: Plane, key: bytes) -> None:
        """Admit the client identity derived from ``key`` on the plane's sockets."""
        self._admitted[zap_domain(plane)] = client_public(key)

    def start(self) -> None:
        """Serve from now on. Raises ``RuntimeError`` if the context has a gate already."""
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind(self._stop_endpoint)
        self._thread = threading.Thread(target=self._serve, name="curve-gate", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure:
            self.close()
            raise RuntimeError(self._failure)

    def close(self) -> None:
        """Stop serving; sockets of the context admit nobody new afterwards. Idempotent."""
        if self._stop is not None and self._thread is not None:
            if self._thread.is_alive():
                self._stop.send(b"", zmq.NOBLOCK)
                self._thread.join(5.0)
            self._stop.close(0)
            self._stop = None

    def _serve(self) -> None:
        handler = self._context.socket(zmq.REP)
        stop = self._context.socket(zmq.PAIR)
        try:
            handler.setsockopt(zmq.LINGER, 0)
            try:
                handler.bind(_ZAP_ENDPOINT)
                stop.connect(self._stop_endpoint)
            except zmq.ZMQError as error:
                self._failure = f"the CURVE gate cannot start: {error.strerror}"
                return
            finally:
                self._ready.set()
            poller = zmq.Poller()
            poller.register(handler, zmq.POLLIN)
            poller.register(stop, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if stop in ready:
                    return
                if handler in ready:
                    handler.send_multipart(self._answer(handler.recv_multipart()))
        except zmq.ContextTerminated:
            return
        finally:
            handler.close(0)
            stop.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        head = request[:2] if len(request) >= 2 else [_ZAP_VERSION, b""]
        if len(request) == 7 and request[0] == _ZAP_VERSION and request[5] == b"CURVE" and len(request[6]) == 32:
            expected = self._admitted.get(request[2])
            # Public keys on both sides: no secret is compared here.
            if expected is not None and z85(request[6]) == expected:
                return [_ZAP_VERSION, head[1], b"200", b"OK", b"kvferry", b""]
        self.refused += 1
        _log.warning("refused a peer without the service's key", extra=logs.fields(refused=self.refused))
        return [_ZAP_VERSION, head[1], b"400", b"no access", b"", b""]
