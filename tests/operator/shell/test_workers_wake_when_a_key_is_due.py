"""The workers around the queue: they wake in time, isolate failures, and stop in order."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from kvferry_operator.shell import clock
from kvferry_operator.shell.api import FencedError
from kvferry_operator.shell.queue import Outcome, QueueLimits
from kvferry_operator.shell.workers import Workers

LIMITS = QueueLimits(workers=4, backoff_first_s=0.02, backoff_most_s=0.1)
Run = Callable[[str], Awaitable[Outcome]]


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return as soon as a condition holds. Raises ``TimeoutError``."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.002)


class Rig:
    """Workers that run, and a count of runs."""

    def __init__(self, run: Run | None = None, *, limits: QueueLimits = LIMITS, pass_s: float = 5.0) -> None:
        self.runs: Counter[str] = Counter()
        self._run = run
        self.workers: Workers[str] = Workers(self.run, limits, self.now, pass_s=pass_s)
        self._step = 0.0

    def now(self) -> float:
        """A clock that is a little later at each look, as a busy machine's is."""
        self._step += 1e-4
        return clock.now() + self._step

    async def run(self, key: str) -> Outcome:
        self.runs[key] += 1
        return Outcome() if self._run is None else await self._run(key)

    async def until(self, true: Callable[[], bool], seconds: float = 10.0) -> None:
        await until(true, seconds)

    @contextlib.asynccontextmanager
    async def running(self):  # type: ignore[no-untyped-def]
        task = asyncio.create_task(self.workers.run())
        try:
            yield task
        finally:
            self.workers.stop()
            await task


async def test_a_change_soon_after_a_run_is_never_slept_over() -> None:
    """The key is due some milliseconds ahead; between that look and the sleep it comes due."""
    rig = Rig()
    async with rig.running():
        for number in range(1, 15):
            rig.workers.add("a")
            await rig.until(lambda number=number: rig.runs["a"] >= number, 2.0)


async def test_a_failing_key_comes_back_and_others_go_on() -> None:
    """Also one whose pass raises what nobody expected."""

    async def run(key: str) -> Outcome:
        if key == "raises":
            raise ZeroDivisionError
        return Outcome(failed=key == "fails")

    rig = Rig(run)
    async with rig.running():
        for key in ("raises", "fails", "well"):
            rig.workers.add(key)
        await rig.until(lambda: rig.runs["raises"] > 3 and rig.runs["fails"] > 3)
        rig.workers.add("well")
        await rig.until(lambda: rig.runs["well"] == 2)


async def test_a_pass_has_a_deadline() -> None:
    """One that hangs is cancelled and tried again; it takes one worker only."""

    async def run(key: str) -> Outcome:
        await asyncio.sleep(60 if key == "hangs" else 0)
        return Outcome()

    rig = Rig(run, pass_s=0.05)
    async with rig.running():
        rig.workers.add("hangs")
        rig.workers.add("well")
        await rig.until(lambda: rig.runs["hangs"] > 2 and rig.runs["well"] == 1)


async def test_keys_run_side_by_side_up_to_the_cap() -> None:
    """Four at once, the fifth when one has ended."""
    gate, inside, most = asyncio.Event(), 0, 0

    async def run(key: str) -> Outcome:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await gate.wait()
        inside -= 1
        return Outcome()

    rig = Rig(run)
    async with rig.running():
        for number in range(10):
            rig.workers.add(str(number))
        await rig.until(lambda: inside == LIMITS.workers)
        gate.set()
        await rig.until(lambda: rig.runs.total() == 10)
    assert most == LIMITS.workers


async def test_a_stop_lets_running_passes_end() -> None:
    """Nothing new is taken, nothing is cut."""
    gate, ended = asyncio.Event(), []

    async def run(key: str) -> Outcome:
        await gate.wait()
        ended.append(key)
        return Outcome()

    rig = Rig(run)
    task = asyncio.create_task(rig.workers.run())
    rig.workers.add("a")
    await rig.until(lambda: rig.runs["a"] == 1)
    rig.workers.stop()
    rig.workers.add("b")
    gate.set()
    async with asyncio.timeout(5):
        await task
    assert ended == ["a"]
    assert rig.runs["b"] == 0


async def test_a_closed_fence_ends_all_work() -> None:
    """Who may not write takes nothing more."""

    async def run(key: str) -> Outcome:
        raise FencedError

    rig = Rig(run)
    rig.workers.add("a")
    async with asyncio.timeout(5):
        await rig.workers.run()
    assert rig.workers.fenced


async def test_a_pass_beyond_its_deadline_is_told() -> None:
    """By it health says that a worker is stuck: its deadline passed and it still runs."""
    gate = asyncio.Event()

    async def run(key: str) -> Outcome:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):  # deaf to it
                await gate.wait()
        return Outcome()

    rig = Rig(run, pass_s=0.02)
    async with rig.running():
        rig.workers.add("deaf")
        await rig.until(lambda: rig.workers.stuck_s() > 0.05)
        gate.set()
    assert rig.workers.stuck_s() == 0.0


@pytest.mark.parametrize("failed", [True, False])
async def test_each_pass_is_measured(failed: bool) -> None:
    """How long it took, and whether it is tried again."""
    seen: list[tuple[float, bool]] = []
    workers: Workers[str] = Workers(
        lambda key: asyncio.sleep(0, Outcome(failed=failed)), LIMITS, clock.now, lambda s, f: seen.append((s, f))
    )
    workers.add("a")
    task = asyncio.create_task(workers.run())
    await until(lambda: bool(seen))
    workers.stop()
    await task
    assert seen[0][0] >= 0
    assert seen[0][1] is failed
