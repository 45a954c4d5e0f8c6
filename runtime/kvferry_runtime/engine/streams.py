"""What the EngineCore says of each leg, as a bounded queue per leg in the API server. For one event loop's thread."""

import asyncio
from collections import deque

from kvferry_runtime.core.messages import EngineOutput, FailOut, HandedOver, LegKey, PrefilledOut
from kvferry_wire.frames import FailKind


class LegStream:
    """One leg's outputs, in order. After a ``FailOut`` nothing more comes."""

    def __init__(self, key: LegKey, limit: int) -> None:
        self.key = key
        self._limit = limit
        self._outputs: deque[EngineOutput] = deque()
        self._arrived = asyncio.Event()

    async def next(self, timeout_s: float) -> EngineOutput | None:
        """The next output, or ``None`` when none came within ``timeout_s`` seconds."""
        if not self._outputs:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        return self._outputs.popleft()

    def take(self) -> list[EngineOutput]:
        """All that has arrived; empty when nothing has."""
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def put(self, output: EngineOutput) -> bool:
        """Queue an output. False: the queue is full, the leg cannot go on."""
        if len(self._outputs) >= self._limit:
            return False
        self._outputs.append(output)
        self._arrived.set()
        return True

    def fail(self, output: FailOut) -> None:
        """End the leg: what waits is dropped, the failure is all that is left."""
        self._outputs.clear()
        self._outputs.append(output)
        self._arrived.set()


class LegStreams:
    """The legs that the API server waits for, by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._streams: dict[LegKey, LegStream] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, key: LegKey) -> bool:
        return key in self._streams

    def open(self, key: LegKey) -> LegStream:
        """Raises ``KeyError`` when a leg of this name is running."""
        if key in self._streams:
            raise KeyError(key)
        stream = self._streams[key] = LegStream(key, self._limit)
        self._empty.clear()
        return stream

    def close(self, key: LegKey) -> None:
        """Outputs for the leg are nobody's from now on. Idempotent."""
        self._streams.pop(key, None)
        if not self._streams:
            self._empty.set()

    async def wait_empty(self, within_s: float | None) -> bool:
        """Wait until no leg runs; false when some still do after ``within_s`` seconds (``None``: for ever)."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def dispatch(self, output: EngineOutput) -> "Undelivered | None":
        """Give an output to its leg, or say what to do about one that has none."""
        stream = self._streams.get(output.key)
        if stream is None:
            return Undelivered(_lease_of(output), overflow=False)
        if stream.put(output):
            return None
        stream.fail(FailOut(key=output.key, kind="internal", message="The answer was read too slowly."))
        return Undelivered(_lease_of(output), overflow=True)

    def fail(self, key: LegKey, output: FailOut) -> None:
        """End one leg, if it runs."""
        if (stream := self._streams.get(key)) is not None:
            stream.fail(output)

    def fail_all(self, message: str, kind: FailKind = "internal") -> int:
        """End every leg in an error; returns how many there were."""
        for key, stream in self._streams.items():
            stream.fail(FailOut(key=key, kind=kind, message=message))
        return len(self._streams)


class Undelivered:
    """An output that reached no leg: the lease that it names must be withdrawn; ``overflow``: abort the leg."""

    def __init__(self, lease_id: int | None, *, overflow: bool) -> None:
        self.lease_id = lease_id
        self.overflow = overflow


def _lease_of(output: EngineOutput) -> int | None:
    if isinstance(output, (PrefilledOut, HandedOver)) and output.handle is not None:
        return output.handle.lease_id
    return None
