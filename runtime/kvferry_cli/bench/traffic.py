"""One round of the load against one side."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from kvferry_cli.bench.client import AnswerError, Client
from kvferry_cli.bench.load import Schedule
from kvferry_cli.bench.records import Trace

SETTLED_EVENTS = 4  # of each stream's first answer, before the first long prompt is sent


class _Slot:
    """One of the running streams: asks again as soon as its answer has ended."""

    def __init__(self, client: Client, schedule: Schedule, round_number: int, number: int) -> None:
        self._client, self._schedule = client, schedule
        self._round, self._number = round_number, number
        self.traces: list[Trace] = []
        self.settled = asyncio.Event()  # its first answer is well under way

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            request = self._schedule.stream(self._round, self._number, len(self.traces))
            trace = self._client.begin(request)
            self.traces.append(trace)
            await self._client.follow(trace, self._heard)
            self.settled.set()

    def _heard(self) -> None:
        if len(self.traces[0].events) >= SETTLED_EVENTS:
            self.settled.set()


Edge = Callable[[], Awaitable[None]]


async def run_round(
    client: Client, schedule: Schedule, round_number: int, *, limit_s: float, on_begin: Edge, on_end: Edge
) -> tuple[float, float, tuple[Trace, ...]]:
    """Start the streams, send the long prompts one at a time, cut the streams.

    Args:
        limit_s: the round's deadline.
        on_begin, on_end: called at the window's edges.

    Returns:
        The window's begin and end, and all requests.

    Raises:
        AnswerError: a wrong answer, or the deadline passed.
    """
    slots = [_Slot(client, schedule, round_number, number) for number in range(schedule.spec.streams)]
    prompts: list[Trace] = []
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks_of_round:
            tasks = [tasks_of_round.create_task(slot.run()) for slot in slots]
            for slot in slots:
                await slot.settled.wait()
            await on_begin()
            began = time.perf_counter()
            for index in range(schedule.spec.prompts):
                prompts.append(client.begin(schedule.prompt(round_number, index)))
                await client.follow(prompts[-1])
                if index + 1 < schedule.spec.prompts:
                    await asyncio.sleep(schedule.pause(round_number, index))
            ended = time.perf_counter()
            await on_end()
            for task in tasks:
                task.cancel()
    except TimeoutError:
        done = sum(trace.complete for trace in prompts)
        told = f"the round was not over within {limit_s:g} s: {done} of {schedule.spec.prompts} long prompts answered"
        raise AnswerError(told) from None
    except ExceptionGroup as group:
        wrong, other = group.split(AnswerError)
        if other is not None or wrong is None:
            raise
        raise wrong.exceptions[0] from None
    return began, ended, (*prompts, *(trace for slot in slots for trace in slot.traces))
