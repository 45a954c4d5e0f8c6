"""The state stream's sending end: KV events and load, numbered, and the snapshot that agrees with the numbers."""

from collections.abc import Iterable, Iterator

import zmq

from kvferry_service.curve import Gate, bind_tcp, secure_server
from kvferry_wire import state
from kvferry_wire.limits import Limits
from kvferry_wire.state import BlocksRemoved, BlocksStored, Load, Snapshot, StateEvent, StateMessage

_EVENT_HASHES = 4096  # of one message; a longer event goes as several


class StateNumbers:
    """Numbers the events of one incarnation and knows when load is due. Pure."""

    def __init__(self, incarnation: bytes, limits: Limits) -> None:
        self._incarnation = incarnation
        self._interval_s = limits.load_interval_s
        self._sequence = 0
        self._load: Load | None = None
        self._load_at = 0.0

    @property
    def sequence(self) -> int:
        """Of the last message."""
        return self._sequence

    def messages(self, events: Iterable[StateEvent], load: Load, now: float) -> Iterator[StateMessage]:
        """The next messages: all events in order, then the load if it changed or is due."""
        for event in events:
            for piece in _pieces(event):
                yield self._number(piece)
        if load != self._load or now - self._load_at >= self._interval_s:
            self._load, self._load_at = load, now
            yield self._number(load)

    def snapshot(self, hashes: tuple[bytes, ...], load: Load) -> Snapshot:
        """What the stream has said so far. All events of earlier changes must have been numbered before."""
        return Snapshot(incarnation=self._incarnation, sequence=self._sequence, hashes=hashes, load=load)

    def _number(self, event: StateEvent) -> StateMessage:
        self._sequence += 1
        return StateMessage(incarnation=self._incarnation, sequence=self._sequence, event=event)


def _pieces(event: StateEvent) -> Iterator[StateEvent]:
    if isinstance(event, BlocksStored):
        for start in range(0, len(event.hashes), _EVENT_HASHES):
            parent = event.parent if start == 0 else event.hashes[start - 1]
            yield BlocksStored(hashes=event.hashes[start : start + _EVENT_HASHES], parent=parent, tier=event.tier)
    elif isinstance(event, BlocksRemoved):
        for start in range(0, len(event.hashes), _EVENT_HASHES):
            yield BlocksRemoved(hashes=event.hashes[start : start + _EVENT_HASHES])
    else:
        yield event


class StatePublisher:
    """A PUB socket under CURVE. A subscriber that does not keep up loses messages, sees the gap and joins again."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", host: str, port: int, key: bytes, limits: Limits
    ) -> None:
        """Raises ``OSError`` naming the address when it cannot be bound."""
        self._gate = Gate(context)
        self._gate.admit("state", key)
        self._gate.start()
        self._socket = context.socket(zmq.PUB)
        secure_server(self._socket, key, "state", limits)
        self._socket.setsockopt(zmq.SNDHWM, limits.state_buffer)
        self.dropped = 0
        try:
            self.port = bind_tcp(self._socket, host, port)
        except OSError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"--state-port: cannot listen on {host}:{port}: {error.strerror}") from None

    def send(self, messages: Iterable[StateMessage]) -> None:
        for message in messages:
            try:
                self._socket.send(state.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                self.dropped += 1

    def close(self) -> None:
        self._socket.close(0)
        self._gate.close()
