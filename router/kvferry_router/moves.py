"""Answers leave decode pods that end soon: which legs are asked to, and when. Pure; ``Mover`` is its shell.

A leg is asked only while another pod could go on with it and has room for all of its answer, again after a while if it
is still there. A leg that finds no other pod ends where it is, or with its pod's grace.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from kvferry_router.pool import PodPool
from kvferry_router.proxy import RequestRun
from kvferry_wire.limits import Limits

_EVERY_S = 0.1


class Place(NamedTuple):
    """A running decode leg, and where."""

    internal_id: str
    attempt: int
    pod: str
    tokens: int  # of the prompt and the longest answer


class Moves:
    """What was asked, for as long as it may have to be asked again."""

    def __init__(self, limits: Limits) -> None:
        self._again_s = limits.move_again_s
        self._most = limits.moves
        self._asked: dict[Place, float] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def due(self, running: Iterable[Place], leaving: Mapping[str, int], now: float) -> list[Place]:
        """Legs to ask now, of those that run; ``leaving``: the longest context of stand-ins, by pod that drains."""
        places = [place for place in running if place.tokens <= leaving.get(place.pod, 0)]
        self._asked = {place: self._asked[place] for place in places if place in self._asked}
        due = [place for place in places if now >= self._asked.get(place, now)][: self._most]
        self._asked |= dict.fromkeys(due, now + self._again_s)
        return due


class Mover:
    """Looks at the pods and the requests under way, every so often."""

    def __init__(self, pool: PodPool, runs: Callable[[], Collection[RequestRun]], limits: Limits) -> None:
        self._pool = pool
        self._runs = runs
        self._moves = Moves(limits)

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_EVERY_S)
            leaving = self._pool.leaving()
            if not leaving and not self._moves:
                continue
            places = {place: run for run in self._runs() if (place := run.place()) is not None}
            for place in self._moves.due((Place(*at) for at in places), leaving, loop.time()):
                places[place].move()
