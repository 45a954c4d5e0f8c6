"""Performs a schedule on a plant: processes of this machine, or pods of a cluster, or whatever else can be harmed.

A fault of links is not undone step by step: after each beginning and end the plant is given all rules in force.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, Protocol

import msgspec

from tests.chaos.namespaces import LinkRule
from tests.chaos.schedule import OF_TRANSFERS, Fault, Kind
from tests.chaos.wire import Spoil

Part = Literal["server", "engine"]
PATIENCE_S = 60.0  # that a fault waits for what it is to hit, which may just be starting

_SPOILS: dict[Kind, Literal["reset", "hold", "flip"]] = {
    Kind.RESET_TRANSFER: "reset",
    Kind.HOLD_TRANSFER: "hold",
    Kind.FLIP_TRANSFER: "flip",
}


class Plant(Protocol):
    """What faults act on. Each act says whether there was something to act on; healing finds what it finds."""

    async def kill(self, pod: str, part: Part) -> bool:
        """SIGKILL of a part: the engine alone, or with the server the whole pod. It stays dead until ``start``."""

    async def exhaust(self, pod: str) -> bool:
        """Fill a pod's memory to its limit: the kernel ends its largest process. Returns when it has."""

    async def stop(self, pod: str) -> bool:
        """Ask a pod to end in order, and wait until it has."""

    async def start(self, pod: str) -> None:
        """Start a pod that has ended, at the address it had."""

    async def pause(self, pod: str, part: Part) -> tuple[int, ...]:
        """SIGSTOP of the engine alone if it serves, or of the whole pod. Returns what ``resume`` needs, or nothing."""

    async def resume(self, paused: tuple[int, ...]) -> None:
        """SIGCONT of these, as far as they are still there."""

    async def links(self, rules: Iterable[LinkRule]) -> None:
        """These rules hold for packets between pods from now on, and no others."""

    async def spoil(self, pod: str, spoil: Spoil) -> None:
        """What the wire of a prefill pod does from now on."""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """A fault as it happened. Times are of time.monotonic."""

    fault: Fault
    at: float  # when it hit; a pod that is just starting is waited for
    healed_at: float
    hit: bool  # there was something to hit


class Injector:
    """Performs one schedule."""

    def __init__(self, plant: Plant, say: Callable[[str], None]) -> None:
        self._plant, self._say = plant, say
        self._rules: dict[int, tuple[LinkRule, ...]] = {}
        self._stopped: Counter[int] = Counter()  # process -> faults that it stands still for
        self.applied: list[Applied] = []

    async def perform(self, schedule: Iterable[Fault]) -> None:
        """All faults, from now on; returns when all are healed."""
        begun = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for fault in schedule:
                group.create_task(self._perform(fault, begun))

    async def _perform(self, fault: Fault, begun: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, begun + fault.at - loop.time()))
        asked_at = loop.time()
        hit_at = await self._act(fault)
        self.applied.append(
            Applied(
                fault=fault,
                at=asked_at if hit_at is None else hit_at,
                healed_at=loop.time(),
                hit=hit_at is not None,
            )
        )
        self._say(f"{fault.told()}{': nothing to hit' if hit_at is None else ''}")

    async def _act(self, fault: Fault) -> float | None:
        """Begin the fault, let it last, heal it. Returns when it hit, ``None`` where nothing was there to hit.

        It lasts from the hit on: an engine that is to be wedged for long is wedged for as long, however late it starts.
        """
        lasts = fault.until - fault.at
        match fault.kind:
            case Kind.KILL_POD | Kind.KILL_DECODES | Kind.KILL_ROUTER:
                return await self._kill(fault.targets, lasts)
            case Kind.KILL_ENGINE:
                return await _patiently(lambda: self._plant.kill(fault.targets[0], "engine"))
            case Kind.OOM_KILL:
                return await _patiently(lambda: self._plant.exhaust(fault.targets[0]))
            case Kind.RESTART_POD | Kind.RESTART_ROUTER:
                hit_at = await _patiently(lambda: self._plant.stop(fault.targets[0]))
                await self._plant.start(fault.targets[0])
                return hit_at
            case Kind.PAUSE_POD | Kind.PAUSE_ROUTER:
                return await self._pause(fault.targets[0], "server", lasts)
            case Kind.WEDGE_ENGINE:
                return await self._pause(fault.targets[0], "engine", lasts)
            case kind if kind in OF_TRANSFERS:
                hit_at = asyncio.get_running_loop().time()
                await self._plant.spoil(
                    fault.targets[0], Spoil(how=_SPOILS[kind], after=int(fault.value), fault=fault.number)
                )
                await asyncio.sleep(lasts)
                await self._plant.spoil(fault.targets[0], Spoil(how="nothing"))
                return hit_at
            case _:
                hit_at = asyncio.get_running_loop().time()
                await self._change_links(fault.number, rules_of(fault))
                await asyncio.sleep(lasts)
                await self._change_links(fault.number, ())
                return hit_at

    async def _kill(self, pods: tuple[str, ...], lasts: float) -> float | None:
        hits = await asyncio.gather(*(_patiently(lambda pod=pod: self._plant.kill(pod, "server")) for pod in pods))
        await asyncio.sleep(lasts)
        for pod in pods:
            await self._plant.start(pod)
        return min((hit_at for hit_at in hits if hit_at is not None), default=None)

    async def _pause(self, pod: str, part: Part, lasts: float) -> float | None:
        paused: tuple[int, ...] = ()

        async def pause() -> bool:
            nonlocal paused
            paused = await self._plant.pause(pod, part)
            self._stopped.update(paused)
            return bool(paused)

        try:
            if (hit_at := await _patiently(pause)) is not None:
                await asyncio.sleep(lasts)
        finally:
            self._stopped.subtract(paused)
            await self._plant.resume(tuple(pid for pid in paused if not self._stopped[pid]))
        return hit_at

    async def _change_links(self, number: int, rules: tuple[LinkRule, ...]) -> None:
        self._rules[number] = rules
        await self._plant.links([rule for each in self._rules.values() for rule in each])


async def _patiently(act: Callable[[], Awaitable[bool]]) -> float | None:
    """Try until there was something to act on. Returns when that try began, ``None`` when patience was over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while (began := loop.time()) <= deadline:
        if await act():
            return began
        await asyncio.sleep(0.1)
    return None


def rules_of(fault: Fault) -> tuple[LinkRule, ...]:
    """What a fault of links does to packets."""
    match fault.kind:
        case Kind.CUT:
            one, other = fault.targets
            return (LinkRule(source=one, target=other), LinkRule(source=other, target=one))
        case Kind.CUT_ONE_WAY:
            return (LinkRule(source=fault.targets[0], target=fault.targets[1]),)
        case Kind.ISOLATE:
            (pod,) = fault.targets
            return (LinkRule(source="", target=pod), LinkRule(source=pod, target=""))
        case Kind.LOSS:
            return (LinkRule(source="", target="", lost=fault.value),)
        case Kind.THROTTLE:
            return (LinkRule(source=fault.targets[0], target=fault.targets[1], bytes_per_s=fault.value),)
        case _:
            raise ValueError(f"{fault.kind} is no fault of links")
