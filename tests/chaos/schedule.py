"""What is broken when: a pure function of a seed. Nothing here knows what a process, a network or a cluster is.

Kinds are dealt like cards from a shuffled deck, so that each comes up once before any comes up twice. In the second
half of a long run one pod of each role is spared from what ends processes: it lives long enough for its memory's slope
to count.
"""

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec

GAP_S = (1.0, 3.6)  # between the beginnings of two faults
LEAST_S = 2.0  # from the last beginning to the end of the faults
RECOVERY_S = 10.0  # that a pod is given before it is taken away again, where another of its role can be taken
SPARING_FROM_S = 120.0  # of faults, from which on the second half spares pods
ALL_GONE_S = 60.0  # between two kills of every decode pod
LONG_WEDGE_S = 24.0  # longer than a pod's patience with its engine (`limits.engine_kill_s`)


class Kind(StrEnum):
    """What a fault is, from outside."""

    KILL_POD = "kill_pod"  # SIGKILL of both of a pod's processes, started again at the same address
    KILL_ENGINE = "kill_engine"  # SIGKILL of the engine alone
    OOM_KILL = "oom_kill"  # a pod's memory limit is reached: the kernel ends its largest process, the engine
    KILL_DECODES = "kill_decodes"  # SIGKILL of every decode pod at once
    KILL_ROUTER = "kill_router"
    RESTART_POD = "restart_pod"  # SIGTERM, and started again at the same address once it has ended
    RESTART_ROUTER = "restart_router"
    PAUSE_POD = "pause_pod"  # SIGSTOP of both processes, SIGCONT later
    PAUSE_ROUTER = "pause_router"
    WEDGE_ENGINE = "wedge_engine"  # SIGSTOP of the engine alone
    CUT = "cut"  # no packet between two pods
    CUT_ONE_WAY = "cut_one_way"  # none from the first to the second
    ISOLATE = "isolate"  # none between one pod and all others
    LOSS = "loss"  # `value` of all packets are lost, on every link
    THROTTLE = "throttle"  # from the first pod to the second `value` bytes a second pass
    RESET_TRANSFER = "reset_transfer"  # a KV connection is reset after `value` bytes
    HOLD_TRANSFER = "hold_transfer"  # the last byte of what a prefill pod sends is kept back
    FLIP_TRANSFER = "flip_transfer"  # one bit is changed after `value` bytes, behind TCP's back


ENDING = frozenset(
    {Kind.KILL_POD, Kind.KILL_ENGINE, Kind.OOM_KILL, Kind.KILL_DECODES, Kind.KILL_ROUTER}
    | {Kind.RESTART_POD, Kind.RESTART_ROUTER}
)  # what ends processes by itself
OF_TRANSFERS = frozenset({Kind.RESET_TRANSFER, Kind.HOLD_TRANSFER, Kind.FLIP_TRANSFER})
LOSSES = (0.05, 0.2)

# Seconds that a fault lasts.
_LASTS: dict[Kind, tuple[float, float]] = {
    Kind.KILL_POD: (0.2, 2.0),
    Kind.KILL_ENGINE: (0.0, 0.0),
    Kind.OOM_KILL: (0.0, 0.0),
    Kind.KILL_DECODES: (0.2, 1.0),
    Kind.KILL_ROUTER: (0.2, 1.5),
    Kind.RESTART_POD: (0.0, 0.0),
    Kind.RESTART_ROUTER: (0.0, 0.0),
    Kind.PAUSE_POD: (0.3, 7.0),
    Kind.PAUSE_ROUTER: (0.3, 3.0),
    Kind.WEDGE_ENGINE: (1.0, 12.0),
    Kind.CUT: (1.0, 10.0),
    Kind.CUT_ONE_WAY: (1.0, 10.0),
    Kind.ISOLATE: (1.0, 8.0),
    Kind.LOSS: (4.0, 7.0),
    Kind.THROTTLE: (3.0, 8.0),
    Kind.RESET_TRANSFER: (3.0, 5.0),
    Kind.HOLD_TRANSFER: (2.0, 8.0),
    Kind.FLIP_TRANSFER: (3.0, 5.0),
}
_AWAY = ENDING | {Kind.PAUSE_POD, Kind.PAUSE_ROUTER, Kind.WEDGE_ENGINE, Kind.ISOLATE}


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The pods that there are, by name."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    routers: tuple[str, ...]

    @property
    def engines(self) -> tuple[str, ...]:
        return self.prefill + self.decode

    @property
    def pods(self) -> tuple[str, ...]:
        return self.engines + self.routers


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. Times are seconds from the beginning of all faults."""

    number: int
    kind: Kind
    at: float
    until: float  # when it is healed; equal to ``at`` where the product heals itself
    targets: tuple[str, ...]  # for faults of links: from, to
    value: float = 0.0

    def told(self) -> str:
        """One line of a schedule."""
        lasts = f" for {self.until - self.at:.1f} s" if self.until > self.at else ""
        value = f" {self.value:g}" if self.value else ""
        return f"{self.at:6.1f}  #{self.number:<3} {self.kind}{value} {' -> '.join(self.targets) or 'all links'}{lasts}"


def make_schedule(
    seed: int, seconds: float, topology: Topology, kinds: Sequence[Kind], gap_s: tuple[float, float] = GAP_S
) -> tuple[Fault, ...]:
    """Faults of so many seconds; all are healed by their end.

    Args:
        kinds: those that can be had; each comes up at least once if there is time for as many faults.
        gap_s: least and most seconds between the beginnings of two faults.
    """
    return tuple(_Dealer(seed, seconds, topology, tuple(kinds)).deal(gap_s))


def losses(seconds: float) -> tuple[Fault, ...]:
    """Nothing but lost packets: a small share on every link, then a large one."""
    half = seconds / 2
    return tuple(
        Fault(number=number, kind=Kind.LOSS, at=number * half, until=(number + 1) * half, targets=(), value=share)
        for number, share in enumerate(LOSSES)
    )


class _Dealer:
    def __init__(self, seed: int, seconds: float, topology: Topology, kinds: tuple[Kind, ...]) -> None:
        self._source = random.Random(f"chaos/{seed}")
        self._seconds, self._topology, self._kinds = seconds, topology, kinds
        self._back: dict[str, float] = {}  # pod -> when it can be taken away again
        self._losses = 0
        self._all_gone = -ALL_GONE_S
        roles = (topology.prefill, topology.decode, topology.routers)
        self._spared = {self._source.choice(role) for role in roles if len(role) > 1}

    def deal(self, gap_s: tuple[float, float]) -> list[Fault]:
        faults: list[Fault] = []
        deck: list[Kind] = []
        at = self._source.uniform(*gap_s) / 2
        while at < self._seconds - LEAST_S:
            if not deck:
                deck = list(self._kinds)
                self._source.shuffle(deck)
            kind = deck.pop()
            if kind is not Kind.KILL_DECODES or self._may_kill_all(at):
                faults.append(self._draw(len(faults), kind, at))
                at += self._source.uniform(*gap_s)
        return faults

    def _may_kill_all(self, at: float) -> bool:
        if self._sparing(at) or at < self._all_gone + ALL_GONE_S:
            return False
        self._all_gone = at
        return True

    def _sparing(self, at: float) -> bool:
        return self._seconds >= SPARING_FROM_S and at > self._seconds / 2

    def _draw(self, number: int, kind: Kind, at: float) -> Fault:
        lasts = self._source.uniform(*_LASTS[kind])
        if kind is Kind.WEDGE_ENGINE and self._source.random() < 0.25 and at + LONG_WEDGE_S < self._seconds:
            lasts = LONG_WEDGE_S
        until = min(at + lasts, self._seconds)
        targets = self._targets(kind, at, ending=kind in ENDING or lasts == LONG_WEDGE_S)
        if kind in _AWAY:
            self._back.update(dict.fromkeys(targets, until + RECOVERY_S))
        return Fault(number=number, kind=kind, at=at, until=until, targets=targets, value=self._value(kind))

    def _targets(self, kind: Kind, at: float, *, ending: bool) -> tuple[str, ...]:
        topology = self._topology
        match kind:
            case Kind.KILL_DECODES:
                return topology.decode
            case Kind.KILL_ROUTER | Kind.RESTART_ROUTER | Kind.PAUSE_ROUTER:
                return (self._one(topology.routers, at, ending=ending),)
            case Kind.CUT | Kind.CUT_ONE_WAY:
                return self._pair()
            case Kind.THROTTLE:
                return (self._source.choice(topology.prefill), self._source.choice(topology.decode))
            case Kind.LOSS:
                return ()
            case Kind.RESET_TRANSFER | Kind.HOLD_TRANSFER | Kind.FLIP_TRANSFER:
                return (self._source.choice(topology.prefill),)
            case _:
                role = self._source.choice((topology.prefill, topology.decode, topology.decode))
                return (self._one(role, at, ending=ending),)

    def _one(self, role: Sequence[str], at: float, *, ending: bool) -> str:
        """A pod of a role: not the spared one, and one that is there, if such are left."""
        allowed = [name for name in role if not (ending and self._sparing(at) and name in self._spared)]
        there = [name for name in allowed if self._back.get(name, 0.0) <= at]
        return self._source.choice(there or allowed)

    def _pair(self) -> tuple[str, str]:
        """Two pods that speak with each other, in either order."""
        topology = self._topology
        one = self._source.choice(topology.engines)
        readers = topology.decode if one in topology.prefill else topology.prefill
        other = self._source.choice(readers if self._source.random() < 0.6 else topology.routers)
        return (one, other) if self._source.random() < 0.5 else (other, one)

    def _value(self, kind: Kind) -> float:
        match kind:
            case Kind.LOSS:
                self._losses += 1
                return LOSSES[self._losses % len(LOSSES)]
            case Kind.THROTTLE:
                return float(self._source.choice((1_000, 8_000, 64_000)))
            case Kind.RESET_TRANSFER | Kind.FLIP_TRANSFER:
                return float(self._source.randrange(1, 60_000))
            case _:
                return 0.0
