"""Runs what the queue says: several keys at a time, each in one task, each pass with a deadline."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Generic

from kvferry_operator.shell.api import FencedError
from kvferry_operator.shell.clock import Clock
from kvferry_operator.shell.queue import Key, Outcome, QueueLimits, WorkQueue
from kvferry_service import logs

PASS_S = 60.0  # of one pass over one key
IDLE_S = 60.0  # longest sleep of a worker
_log = logs.get_logger(__name__)


class Workers(Generic[Key]):
    """The queue with its workers."""

    def __init__(
        self,
        run: Callable[[Key], Awaitable[Outcome]],
        limits: QueueLimits,
        clock: Clock,
        observe: Callable[[float, bool], None] = lambda seconds, failed: None,
        pass_s: float = PASS_S,
    ) -> None:
        self.queue: WorkQueue[Key] = WorkQueue(limits, random.random)
        self._run = run
        self._limits = limits
        self._clock = clock
        self._observe = observe
        self._pass_s = pass_s
        self._changed = asyncio.Event()
        self._stopping = False
        self.fenced = False  # a pass found that this process may not write any more

    def add(self, key: Key, *, urgent: bool = True) -> None:
        """Look at a key soon; one that is not urgent after those that are."""
        self.queue.add(key, self._clock(), urgent=urgent)
        self._changed.set()

    async def run(self) -> None:
        """Work until ``stop`` or until leadership is lost; returns when the running passes have ended."""
        async with asyncio.TaskGroup() as group:
            while not self._stopping:
                now = self._clock()
                while self._free() and (key := self.queue.take(now)) is not None:
                    group.create_task(self._pass(key), name=f"pass {key}")
                await self._wait(now)

    def stop(self) -> None:
        """Take nothing new."""
        self._stopping = True
        self._changed.set()

    def stuck_s(self) -> float:
        """For how long the oldest running pass is beyond its deadline; 0 where none is."""
        return max(0.0, self.queue.longest_run(self._clock()) - self._pass_s)

    def _free(self) -> bool:
        return self.queue.running() < self._limits.workers

    async def _wait(self, now: float) -> None:
        """Until something may be taken: a key is due, was added, or a pass has ended. ``now``: of the last look."""
        due = self.queue.next_due() if self._free() else None
        # A key that was due at that look and was not taken waits for the end of a pass, which wakes us.
        delay = IDLE_S if due is None or due <= now else min(IDLE_S, due - now)
        try:
            async with asyncio.timeout(delay):
                await self._changed.wait()
        except TimeoutError:
            pass  # the key that was waited for is due
        self._changed.clear()

    async def _pass(self, key: Key) -> None:
        begun = self._clock()
        outcome = Outcome(failed=True)
        try:
            async with asyncio.timeout(self._pass_s):
                outcome = await self._run(key)
        except TimeoutError:
            _log.error("a pass took too long", extra=logs.fields(key=key, seconds=self._pass_s))
        except FencedError:
            self.fenced = True
            self.stop()
        except Exception:  # noqa: BLE001 - one key must not stop the others
            _log.exception("a pass failed", extra=logs.fields(key=key))
        finally:
            now = self._clock()
            self.queue.done(key, now, outcome)
            self._observe(now - begun, outcome.failed)
            self._changed.set()
