"""Links between processes: streams (in order, can be cut) and messages (can be lost, doubled, delayed, reordered)."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tests.simulation.world import Process, World


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """How bad a link is, per message. Zero everywhere is a good link."""

    delayed: float = 0.0  # probability of a long delay
    delay_s: float = 0.0  # a long delay is up to so long
    lost: float = 0.0  # a message; on a stream the wait for its repetition
    doubled: float = 0.0  # a message
    cut: float = 0.0  # a stream


GOOD = LinkFaults()


class Wire:
    """One direction of a link: how long each message takes, and whether it arrives."""

    def __init__(self, world: World, name: str, faults: LinkFaults) -> None:
        self.world = world
        self.name = name
        self.faults = faults
        self.closed_until = 0.0  # a partition: nothing passes before
        self._rng = world.rng(f"wire/{name}")

    @property
    def rng(self) -> random.Random:
        return self._rng

    def bad(self) -> bool:
        return self.world.now < self.world.faulty_until

    def happens(self, probability: float, what: str) -> bool:
        if probability and self.bad() and self._rng.random() < probability:
            self.world.count(what)
            return True
        return False

    def delay(self) -> float:
        delay = 0.0005 + 0.003 * self._rng.random()
        if self.happens(self.faults.delayed, "delayed"):
            delay += self.faults.delay_s * self._rng.random() ** 2
        return delay

    def partitioned(self) -> bool:
        return self.world.now < self.closed_until


class Messages:
    """Messages one by one, from one process to another; each may be lost, doubled, delayed and overtaken."""

    def __init__(self, wire: Wire, target: Process, deliver: Callable[..., None]) -> None:
        self._wire = wire
        self._target = target
        self._deliver = deliver

    def send(self, request: str, *message: Any) -> None:
        wire, world = self._wire, self._wire.world
        copies = 1
        if wire.partitioned():
            world.count("lost_in_partition")
            copies = 0
        elif wire.happens(wire.faults.lost, "lost"):
            copies = 0
        elif wire.happens(wire.faults.doubled, "doubled"):
            copies = 2
        if not copies:
            world.log(wire.name, request, f"lost {message[0]!r}")
        for _ in range(copies):
            world.at(world.now + wire.delay(), self._target, self._deliver, message, message=True)


class StreamEnd(Protocol):
    """One side of a stream."""

    def on_message(self, stream: "Stream", message: Any) -> None: ...

    def on_close(self, stream: "Stream") -> None:
        """The other side has closed it in order."""
        ...

    def on_cut(self, stream: "Stream") -> None:
        """It has broken off."""
        ...


class Stream:
    """A connection: in order both ways, until one side closes it or it is cut. A cut is noticed late, or never."""

    def __init__(
        self,
        name: str,
        request: str,
        opener: Process,
        target: Process,
        wires: tuple[Wire, Wire],
        ends: tuple[StreamEnd, StreamEnd],
    ) -> None:
        self.name = name
        self.request = request
        self._sides = (opener, target)
        self._generations = (opener.generation, target.generation)
        self._wires = wires  # opener -> target, target -> opener
        self._ends = ends
        self._last = [0.0, 0.0]  # delivery time of the last message in each direction
        self._closed = [False, False]  # the side sends nothing any more
        self._deaf = [False, False]  # and hears nothing
        self.broken = False
        self.world = opener.world

    def send(self, side: int, message: Any) -> None:
        """Send from a side: 0 is the opener, 1 the target."""
        self._put(side, self._deliver, message)

    def close(self, side: int, *, deaf: bool = True) -> None:
        """In order: what was sent before still arrives. Unless `deaf`, so does what the other side sends."""
        if not self._closed[side]:
            self._put(side, self._close, None)
            self._closed[side] = True
            self._deaf[side] = deaf

    def cut(self, *, tells: tuple[bool, bool] = (True, True), at_once: bool = False) -> None:
        """Break it off. Each side that is told hears of it a little later, or ``at_once`` as of any message."""
        if self.broken:
            return
        self.broken = True
        self.world.log(self.name, self.request, "stream cut")
        for side in (0, 1):
            if tells[side]:
                late = 0.0 if at_once else 2 * self._wires[1 - side].rng.random() ** 3
                self._schedule(side, self.world.now + 0.001 + late, self._told, side)

    def _put(self, side: int, arrive: Callable[..., None], message: Any) -> None:
        if self.broken or self._closed[side]:
            return
        wire = self._wires[side]
        if wire.happens(wire.faults.cut, "cut"):
            told = wire.rng.random()
            self.cut(tells=(told < 0.8, told > 0.2))
            return
        delay = wire.delay()
        if wire.happens(wire.faults.lost, "repeated"):
            delay += 0.2 + wire.rng.random()  # the transport repeats it
        when = max(self._last[side], self.world.now + delay, wire.closed_until)
        self._last[side] = when
        self._schedule(1 - side, when, arrive, 1 - side, message)

    def _schedule(self, side: int, when: float, run: Callable[..., None], *args: Any) -> None:
        self.world.at(when, self._sides[side], run, args, generation=self._generations[side], message=True)

    def _deliver(self, side: int, message: Any) -> None:
        if not self.broken and not self._deaf[side]:
            self._ends[side].on_message(self, message)

    def _close(self, side: int, _: Any) -> None:
        if not self.broken and not self._deaf[side]:
            self._closed[side] = self._deaf[side] = True
            self._ends[side].on_close(self)

    def _told(self, side: int) -> None:
        if not self._deaf[side]:
            self._closed[side] = self._deaf[side] = True
            self._ends[side].on_cut(self)
