"""Running a process's main coroutine: uvloop, and signals that end it in order first and hard second."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import uvloop

from kvferry_service import logs

_log = logs.get_logger(__name__)


class StopSignal:
    """Set once, by the first SIGTERM or SIGINT or by the process itself; ``why`` says which."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.why = ""

    def set(self, why: str) -> None:
        """Ask for the ordered end. For the loop's own thread."""
        if not self._event.is_set():
            self.why = why
            self._event.set()

    def set_threadsafe(self, why: str) -> None:
        """The same from any thread; does nothing when the loop is closed already."""
        try:
            self._loop.call_soon_threadsafe(self.set, why)
        except RuntimeError:
            pass  # the loop is closed: the process is ending anyway

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


def run(main: Callable[[StopSignal], Awaitable[int]]) -> int:
    """Run ``main`` to its end and return its exit status.

    The first SIGTERM or SIGINT sets the stop signal; the second ends the process at once, with status 128 + signal.
    """

    async def guarded() -> int:
        stop = StopSignal()
        loop = asyncio.get_running_loop()

        signals: list[signal.Signals] = []

        def on_signal(number: signal.Signals) -> None:
            # Counted apart from `stop`: a parent that goes closes its pipe and then sends the first signal.
            signals.append(number)
            if len(signals) > 1:
                _log.warning("second signal, ending at once", extra=logs.fields(signal=number.name))
                os._exit(128 + number)
            stop.set(number.name)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        return await main(stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(guarded())
