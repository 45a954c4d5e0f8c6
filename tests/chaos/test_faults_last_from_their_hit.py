"""What a fault is to hit may just be starting: it is waited for, and the fault lasts as long as it was to last."""

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from tests.chaos import faults
from tests.chaos.faults import Injector, Part
from tests.chaos.namespaces import LinkRule
from tests.chaos.schedule import Fault, Kind
from tests.chaos.wire import Spoil

STARTS_S = 0.4  # until anything is there
LASTS_S = 0.3


class LatePlant:
    """Nothing is there for a while; notes what is done to it."""

    def __init__(self, starts_s: float = STARTS_S) -> None:
        self._clock = asyncio.get_running_loop().time
        self.there_at = self._clock() + starts_s
        self.done: list[tuple[str, float]] = []

    def _there(self, what: str) -> bool:
        if self._clock() < self.there_at:
            return False
        self.done.append((what, self._clock()))
        return True

    async def kill(self, pod: str, part: Part) -> bool:
        return self._there("kill")

    async def exhaust(self, pod: str) -> bool:
        return self._there("exhaust")

    async def stop(self, pod: str) -> bool:
        return self._there("stop")

    async def start(self, pod: str) -> None:
        self.done.append(("start", self._clock()))

    async def pause(self, pod: str, part: Part) -> tuple[int, ...]:
        return (1,) if self._there("pause") else ()

    async def resume(self, paused: tuple[int, ...]) -> None:
        self.done.append((f"resume {paused}", self._clock()))

    async def links(self, rules: Iterable[LinkRule]) -> None:
        self.done.append(("links", self._clock()))

    async def spoil(self, pod: str, spoil: Spoil) -> None:
        self.done.append((f"spoil {spoil.how}", self._clock()))


def fault(kind: Kind) -> Fault:
    return Fault(number=0, kind=kind, at=0.0, until=LASTS_S, targets=("decode-0",))


@pytest.mark.parametrize("kind", [Kind.WEDGE_ENGINE, Kind.PAUSE_POD, Kind.KILL_POD])
async def test_it_lasts_from_its_hit_on(kind: Kind) -> None:
    """A judge that reads its times must not take the wait for a part of it."""
    plant = LatePlant()
    injector = Injector(plant, lambda line: None)
    await injector.perform([fault(kind)])
    (applied,) = injector.applied
    assert applied.hit
    assert applied.at >= plant.there_at
    (_, hit_at), (_, healed_at) = plant.done
    assert healed_at - hit_at >= LASTS_S - 0.02
    assert applied.healed_at - applied.at >= LASTS_S - 0.02


@pytest.mark.parametrize("kind", [Kind.OOM_KILL, Kind.KILL_ENGINE, Kind.RESTART_POD, Kind.WEDGE_ENGINE])
async def test_what_never_comes_is_told(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """When patience is over it has hit nothing; a pod that was to be started is started all the same."""
    monkeypatch.setattr(faults, "PATIENCE_S", 0.2)
    plant, lines = LatePlant(starts_s=60.0), list[str]()
    injector = Injector(plant, lines.append)
    await injector.perform([fault(kind)])
    (applied,) = injector.applied
    assert not applied.hit
    assert [line.endswith(": nothing to hit") for line in lines] == [True]
    assert [what for what, _ in plant.done] == {Kind.RESTART_POD: ["start"], Kind.WEDGE_ENGINE: ["resume ()"]}.get(
        kind, []
    )


class Twice(LatePlant):
    """Each pod is a server (1) and an engine (2)."""

    async def pause(self, pod: str, part: Part) -> tuple[int, ...]:
        return (2,) if part == "engine" else (1, 2)


async def test_a_process_stands_still_for_as_long_as_any_fault_wants_it() -> None:
    """A pod that is paused for a while within a wedge goes on without its engine."""
    plant = Twice()
    wedge, pause = fault(Kind.WEDGE_ENGINE), fault(Kind.PAUSE_POD)
    await Injector(plant, lambda line: None).perform([wedge, msgspec.structs.replace(pause, until=LASTS_S / 3)])
    assert [what for what, _ in plant.done] == ["resume (1,)", "resume (2,)"]
