"""The requests that the router works on, from their arrival to the last byte, and their end when the router stops."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from kvferry_router import failures
from kvferry_router.output import as_api_error
from kvferry_router.proxy import RequestRun

_DELIVER_S = 1.0  # for the errors to reach their clients


class Underway:
    """Every request is in ``request``; until its answer begins also in ``preparing``, from then on in ``answering``."""

    def __init__(self) -> None:
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._preparing: set[asyncio.Timeout] = set()
        self._runs: set[RequestRun] = set()
        self._refusing = False
        self._ended = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Raises ``ApiError`` 503 when the router stops."""
        if self._refusing:
            raise as_api_error(failures.STOPPING)
        self._requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Raises ``ApiError`` 503 when the router's grace is over before the body is."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._preparing.add(scope)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise as_api_error(failures.STOPPING) from None
        finally:
            self._preparing.discard(scope)
        if self._ended:
            raise as_api_error(failures.STOPPING)

    @contextmanager
    def answering(self, run: RequestRun) -> Iterator[None]:
        self._runs.add(run)
        try:
            yield
        finally:
            self._runs.discard(run)

    def runs(self) -> frozenset[RequestRun]:
        """Answers under way."""
        return frozenset(self._runs)

    def refuse(self) -> None:
        """Take nothing new; what is under way goes on."""
        self._refusing = True

    async def end(self, grace_s: float) -> None:
        """Wait for what is under way; when the grace is over, tell the rest's clients that the router stops."""
        self.refuse()
        await self._wait(grace_s)
        self._ended = True
        now = asyncio.get_running_loop().time()
        for scope in self._preparing:
            scope.reschedule(now)
        for run in tuple(self._runs):
            run.stop()
        await self._wait(_DELIVER_S)

    async def _wait(self, timeout_s: float) -> None:
        with suppress(TimeoutError):  # what is left is cut by who waits
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
