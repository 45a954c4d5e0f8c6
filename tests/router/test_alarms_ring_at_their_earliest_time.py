"""The timer of a request holds also when its time has come before it is set, as it has when the router was paused."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from kvferry_router.alarm import Alarm

LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    factory: Callable[[], asyncio.AbstractEventLoop] = request.param
    return factory


def rung(factory: Callable[[], asyncio.AbstractEventLoop], *offsets: float | None) -> list[float]:
    """Set an alarm to these times from now, one after the other (``None``: cancel); what it rings for, from now."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        heard: list[float] = []
        alarm = Alarm(loop, heard.append)
        now = loop.time()
        for offset in offsets:
            if offset is None:
                alarm.cancel()
            else:
                alarm.set(now + offset)
        await asyncio.sleep(0.2)
        return [round(due - now, 6) for due in heard]

    with asyncio.Runner(loop_factory=factory) as loop_runner:
        return loop_runner.run(main())


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ((0.05,), [0.05]),
        ((0.05, 0.1), [0.05]),
        ((0.1, 0.05), [0.05]),
        ((-1.0,), [-1.0]),
        ((-1.0, -2.0), [-2.0]),
        ((-1.0, 0.05), [-1.0]),
        ((0.05, -1.0), [-1.0]),
        ((0.05, None), []),
        ((-1.0, None), []),
        ((0.05, None, 0.1), [0.1]),
    ],
)
def test_an_alarm_rings_once_for_the_earliest_time(
    runner: Callable[[], asyncio.AbstractEventLoop], offsets: tuple[float | None, ...], expected: list[float]
) -> None:
    """Also for times that are past when it is set."""
    assert rung(runner, *offsets) == expected


def test_an_alarm_that_rang_can_be_set_by_its_ring(runner: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """As the router does when it finds that it was paused."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        heard: list[float] = []

        def ring(due: float) -> None:
            heard.append(due)
            if len(heard) < 3:
                alarm.set(loop.time() + 0.01)

        alarm = Alarm(loop, ring)
        alarm.set(loop.time() - 5.0)
        await asyncio.sleep(0.2)
        return heard

    with asyncio.Runner(loop_factory=runner) as loop_runner:
        heard = loop_runner.run(main())
    assert heard == sorted(heard)
    assert len(heard) == 3
