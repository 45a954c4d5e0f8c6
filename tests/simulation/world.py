"""Virtual time: one heap of events, processes with their own clocks, and the trace of all that happened.

An event belongs to the process that handles it. Events for a process that is down are lost; those for a paused one wait
and are handled when it wakes, messages before timers, as a process that drains its sockets before it looks at the
clock does. Timers and other events of a process's own making die with its incarnation.
"""

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Violation(AssertionError):
    """An invariant does not hold. ``kind`` is short and stable; ``request`` is the one concerned, if one is."""

    def __init__(self, kind: str, detail: str, request: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.request = request


@dataclass(frozen=True, slots=True)
class Clock:
    """A process's monotonic clock: it starts anywhere and runs at its own rate."""

    offset: float
    rate: float

    def local(self, now: float) -> float:
        return self.offset + now * self.rate

    def world(self, local: float) -> float:
        return (local - self.offset) / self.rate


@dataclass(frozen=True, slots=True)
class TraceLine:
    time: float
    actor: str
    request: str
    text: str

    def __str__(self) -> str:
        return f"{self.time:9.4f}  {self.actor:<8} {self.request:<6} {self.text}"


@dataclass(slots=True)
class _Event:
    process: "Process | None"
    generation: int | None  # None: whoever lives at the address takes it
    timer: bool
    message: bool  # from another process, and still on its way
    run: Callable[..., None]
    args: tuple[Any, ...]


class Process:
    """A process of the service: it can be paused, and die and be started again at the same address."""

    def __init__(self, world: "World", name: str, clock: Clock) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.up = True
        self.paused = False
        self.generation = 1
        self._backlog: list[_Event] = []
        world.processes.append(self)

    @property
    def now(self) -> float:
        """The time on this process's clock."""
        return self.clock.local(self.world.now)

    def log(self, request: str, text: str) -> None:
        self.world.log(self.name, request, text)

    def soon(self, delay: float, run: Callable[..., None], *args: Any) -> None:
        """Do something of its own after so many seconds of the world's time, unless it dies before."""
        self.world.at(self.world.now + delay, self, run, args, generation=self.generation)

    def after_event(self) -> None:
        """Check what must hold after each event of this process."""

    def hold(self, event: _Event) -> None:
        self._backlog.append(event)

    def pause(self) -> None:
        self.paused = True

    def wake(self) -> None:
        """All that was missed happens now."""
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for timers in (False, True):
            for event in backlog:
                if event.timer is timers:
                    self.world.push(self.world.now, event)

    def die(self) -> None:
        """Memory and pending work are gone; the address stays."""
        self.up = False
        self.paused = False
        self.generation += 1
        self._backlog.clear()


class Timer:
    """One wake-up of a process, moved as often as needed; the time is on the process's own clock."""

    def __init__(self, process: Process, run: Callable[[], None]) -> None:
        self._process = process
        self._run = run
        self._version = 0
        self._at: float | None = None

    def set(self, at: float | None) -> None:
        """``None`` or infinity: no wake-up."""
        if at == self._at:
            return
        self._at = at
        self._version += 1
        if at is None or at == float("inf"):
            return
        process = self._process
        when = max(process.world.now, process.clock.world(at) + 1e-9)
        process.world.at(when, process, self._fire, (self._version,), generation=process.generation, timer=True)

    def _fire(self, version: int) -> None:
        if version == self._version:
            self._at = None
            self._run()


@dataclass
class World:
    """The heap, the time and the trace."""

    seed: int
    now: float = 0.0
    faulty_until: float = 0.0  # no fault begins, and no message is hurt, from then on
    processes: list[Process] = field(default_factory=list)
    lines: list[TraceLine] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0  # messages between processes
    events: int = 0

    def __post_init__(self) -> None:
        self._heap: list[tuple[float, int, _Event]] = []
        self._order = 0

    def rng(self, purpose: str) -> random.Random:
        """Random numbers that depend on the seed and the purpose alone."""
        return random.Random(f"{self.seed}/{purpose}")

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by

    def log(self, actor: str, request: str, text: str) -> None:
        self.lines.append(TraceLine(self.now, actor, request, text))

    def at(
        self,
        when: float,
        process: Process | None,
        run: Callable[..., None],
        args: tuple[Any, ...] = (),
        *,
        generation: int | None = None,
        timer: bool = False,
        message: bool = False,
    ) -> None:
        self.in_flight += message
        self.push(when, _Event(process, generation, timer, message, run, args))

    def push(self, when: float, event: _Event) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, event))

    def step(self) -> bool:
        """Let the next event happen; ``False`` when there is none."""
        if not self._heap:
            return False
        self.now, _, event = heapq.heappop(self._heap)
        if event.message:
            self.in_flight -= 1
            event.message = False
        process = event.process
        if process is None:
            event.run(*event.args)
            return True
        if not process.up or (event.generation is not None and event.generation != process.generation):
            return True
        if process.paused:
            process.hold(event)
            return True
        self.events += 1
        event.run(*event.args)
        process.after_event()
        return True

    @property
    def next_time(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def trace_hash(self) -> str:
        """The same for two runs exactly when the same happened in the same order."""
        digest = hashlib.sha256()
        for line in self.lines:
            digest.update(f"{line}\n".encode())
        return digest.hexdigest()
