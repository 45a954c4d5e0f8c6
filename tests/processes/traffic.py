"""Clients that ask one request after the other until they are told to stop; every answer is judged."""

import asyncio
import random
from collections import Counter
from types import TracebackType

import aiohttp

from tests.processes.asking import Answer, Ask, ask_for, judge, make_ask
from tests.support.service import Service

PAUSE_S = 0.1  # after a refusal, as a client that follows Retry-After would, only faster


class Traffic:
    """``async with``: traffic runs within the block; at its end the requests under way are awaited and all judged.

    Args:
        seed: of the requests.
        deadline_s: the service's own, which no request may outlive (by more than a busy machine's delay).
    """

    def __init__(self, service: Service, seed: int, *, clients: int = 12, deadline_s: float = 40.0) -> None:
        self._url = service.url()
        self._seed = seed
        self._clients = clients
        self._deadline_s = deadline_s
        self._stop = asyncio.Event()
        self.answers: list[tuple[Ask, Answer]] = []
        self.router_died = False

    async def __aenter__(self) -> "Traffic":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=self._deadline_s + 10)
        )
        self._tasks = [
            asyncio.create_task(self._ask_on(number, random.Random(f"{self._seed}/{number}")))
            for number in range(self._clients)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if error is not None:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        if error is None:
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            for ask, answer in self.answers:
                judge(ask, answer, router_died=self.router_died)
                assert answer.seconds < self._deadline_s + 5, f"{ask}\n{answer}"

    async def _ask_on(self, client: int, source: random.Random) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            ask = make_ask(source, f"{self._seed}/{client}/{number}")
            try:
                answer = await ask_for(self._session, self._url, ask)
            except aiohttp.ClientConnectionError:
                assert self.router_died, "the router takes no connection"
                await asyncio.sleep(PAUSE_S)
                continue
            self.answers.append((ask, answer))
            if not answer.ok:
                await asyncio.sleep(PAUSE_S)

    async def answered(self, count: int) -> None:
        """Until so many more requests were answered well."""
        wanted = self.well() + count
        async with asyncio.timeout(60):
            while self.well() < wanted:
                self._raise_failure()
                await asyncio.sleep(0.02)

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    def well(self) -> int:
        return sum(answer.ok for _, answer in self.answers)

    def failed(self) -> list[tuple[Ask, Answer]]:
        return [(ask, answer) for ask, answer in self.answers if not answer.ok]

    def paths(self) -> Counter[str]:
        """Of the answers that ended well."""
        return Counter(answer.path for _, answer in self.answers if answer.ok)
