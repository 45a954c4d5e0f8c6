"""Tombstones: names of aborted legs, so that a leg that arrives after its abort is not started."""

from collections import OrderedDict

from kvferry_runtime.core.messages import LegKey


class Tombstones:
    """Aborted legs of the last `seconds`, at most `cap` of them; the oldest are forgotten first."""

    def __init__(self, seconds: float, cap: int) -> None:
        self._seconds = seconds
        self._cap = cap
        self._until: OrderedDict[LegKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: LegKey, now: float) -> None:
        """Remember an abort; a repeated one counts from now."""
        self._until.pop(key, None)
        self._until[key] = now + self._seconds
        self._forget(now)

    def holds(self, key: LegKey, now: float) -> bool:
        """Whether the leg was aborted less than `seconds` ago."""
        self._forget(now)
        return key in self._until

    def _forget(self, now: float) -> None:
        while self._until:
            oldest = next(iter(self._until))
            if len(self._until) <= self._cap and self._until[oldest] > now:
                return
            del self._until[oldest]
