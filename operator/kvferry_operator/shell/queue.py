"""Which service is looked at next. Pure: the time is an argument, nothing here waits.

A key is waiting (it has a time when it is due), running, or running and changed meanwhile. The same key never runs
twice at once and is never queued twice. Runs of a key are ``gap_s`` apart, and changes meanwhile are one. A key that
failed comes back after a back-off; what changes in between brings it forward, but not before ``backoff_first_s`` has
passed. A key whose runs write all the time (somebody else keeps undoing it) is slowed down to one run per ``pace_s``.
Keys that failed take at most half of the workers, so that the others never wait for them.

Keys that changed go before those that come back by themselves, but for each fourth one; and while one that changed
runs, few others do beside it: passes share one thread, and each of its calls would wait for all of theirs.

Where the API server asks for a pause, or cannot be reached, all keys pause; after it only few run at once until one
has succeeded.
"""

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)
WARY_RUNS = 2
CALM_TURN = 4  # of so many runs, one is of a key that comes back by itself, if one is due
CALM_SHARE = 4  # of the workers, one of so many runs such keys while one that changed runs
_Item = tuple[float, int, Key]


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    workers: int = 16
    backoff_first_s: float = 0.5
    backoff_most_s: float = 30.0
    resync_s: float = 600.0  # a key that rests is looked at again, from memory
    gap_s: float = 0.05  # between two runs of a key
    burst: int = 100  # runs of a key that wrote something, before it is paced
    pace_s: float = 1.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    failed: bool = False  # come back with a back-off
    progressed: bool = False  # something of what was wanted is done: the back-off begins anew
    pause_s: float = 0.0  # failed: nothing is to run for so many seconds; the API server is busy or away
    wrote: bool = False  # something was changed in the cluster
    again: bool = False  # more is to be done at once
    gone: bool = False  # nothing is left to do for this key, ever


class _Slot(msgspec.Struct, kw_only=True):
    due: float | None = None  # waiting
    urgent: bool = False  # it changed
    running: bool = False
    changed: bool = False  # while running
    calm: bool = False  # running: it came back by itself
    failures: int = 0
    not_before: float = 0.0
    tokens: float = 0.0
    filled_at: float = 0.0
    started_at: float = 0.0


class WorkQueue(Generic[Key]):
    """The queue. ``spread`` draws from [0, 1): back-offs and resyncs of many keys do not fall together."""

    def __init__(self, limits: QueueLimits, spread: Callable[[], float]) -> None:
        self._limits = limits
        self._spread = spread
        self._slots: dict[Key, _Slot] = {}
        self._heaps: dict[bool, list[_Item[Key]]] = {True: [], False: []}  # urgent, and not
        self._order = itertools.count()
        self._turn = 0
        self._running = 0
        self._running_failed = 0
        self._running_calm = 0
        self._paused_until = 0.0
        self._wary = False  # since the last pause nothing has succeeded

    def add(self, key: Key, now: float, *, urgent: bool = True) -> None:
        """Something about the key changed; or, not urgent, it should be looked at some time."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _Slot(tokens=self._limits.burst, filled_at=now)
        if slot.running:
            slot.changed = True
            return
        self._wait(key, slot, max(now, slot.not_before), urgent)

    def take(self, now: float) -> Key | None:
        """The next key to run, if one is due and may run now."""
        if now < self._paused_until or (self._wary and self._running >= WARY_RUNS):
            return None
        calm_first = self._turn % CALM_TURN == CALM_TURN - 1
        for urgent in (not calm_first, calm_first):
            if not urgent and self._calm_wait():
                continue
            key = self._pop(self._heaps[urgent], urgent, now)
            if key is not None:
                self._turn += 1
                return key
        return None

    def done(self, key: Key, now: float, outcome: Outcome) -> None:
        """A run of the key has ended. Raises ``KeyError`` for a key that does not run."""
        slot = self._slots[key]
        if not slot.running:
            raise KeyError(key)
        slot.running = False
        self._running -= 1
        self._running_calm -= 1 if slot.calm else 0
        self._running_failed -= 1 if slot.failures else 0
        if outcome.pause_s > 0:
            self._paused_until, self._wary = max(self._paused_until, now + outcome.pause_s), True
        elif not outcome.failed:
            self._wary = False
        if outcome.gone and not slot.changed:
            del self._slots[key]
            return
        before = 0 if outcome.progressed else slot.failures
        slot.failures = before + 1 if outcome.failed else 0
        changed, slot.changed = slot.changed or outcome.again, False
        paced = self._paced(slot, outcome.wrote, now)
        if outcome.failed:
            self._back_off(key, slot, now, paced, changed)
            return
        slot.not_before = now + paced
        if changed:
            self._wait(key, slot, slot.not_before, True)
        else:
            self._wait(key, slot, now + self._limits.resync_s * (0.8 + 0.4 * self._spread()), False)

    def next_due(self) -> float | None:
        """When the next key is due; a time that has passed means as soon as a running one has ended."""
        dues = [self._peek(heap, urgent) for urgent, heap in self._heaps.items()]
        found = [due for due in dues if due is not None]
        return max(min(found), self._paused_until) if found else None

    def longest_run(self, now: float) -> float:
        """Seconds that the oldest running key has run for; 0 where none runs."""
        return max((now - slot.started_at for slot in self._slots.values() if slot.running), default=0.0)

    def waiting(self, now: float) -> int:
        """Keys that are due."""
        return sum(1 for slot in self._slots.values() if slot.due is not None and slot.due <= now)

    def failing(self) -> int:
        """Keys whose last run failed."""
        return sum(1 for slot in self._slots.values() if slot.failures)

    def running(self) -> int:
        """Keys that run now."""
        return self._running

    def __len__(self) -> int:
        return len(self._slots)

    # ---- inside

    def _pop(self, heap: list[_Item[Key]], urgent: bool, now: float) -> Key | None:
        held: list[_Item[Key]] = []
        found: Key | None = None
        while heap and heap[0][0] <= now:
            item = heapq.heappop(heap)
            if not self._valid(item, urgent):
                continue
            slot = self._slots[item[2]]
            if slot.failures and self._running_failed >= self._failed_cap():
                held.append(item)
                continue
            found = item[2]
            self._start(slot, now)
            break
        for item in held:
            heapq.heappush(heap, item)
        return found

    def _peek(self, heap: list[_Item[Key]], urgent: bool) -> float | None:
        while heap:
            if self._valid(heap[0], urgent):
                return heap[0][0]
            heapq.heappop(heap)
        return None

    def _valid(self, item: _Item[Key], urgent: bool) -> bool:
        """Whether an entry still says when its key is due: it was not brought forward, taken, or forgotten."""
        slot = self._slots.get(item[2])
        return slot is not None and slot.due == item[0] and slot.urgent == urgent

    def _failed_cap(self) -> int:
        return max(1, self._limits.workers // 2)

    def _calm_wait(self) -> bool:
        """Whether keys that come back by themselves have their share while one that changed runs."""
        most = max(1, self._limits.workers // CALM_SHARE)
        return self._running > self._running_calm and self._running_calm >= most

    def _start(self, slot: _Slot, now: float) -> None:
        slot.due, slot.running, slot.started_at, slot.calm = None, True, now, not slot.urgent
        self._running += 1
        self._running_calm += 1 if slot.calm else 0
        self._running_failed += 1 if slot.failures else 0

    def _paced(self, slot: _Slot, wrote: bool, now: float) -> float:
        """Seconds until the key may run again."""
        gained = max(0.0, now - slot.filled_at) / self._limits.pace_s
        slot.tokens = min(float(self._limits.burst), slot.tokens + gained) - (1.0 if wrote else 0.0)
        slot.filled_at = now
        return (
            self._limits.gap_s
            if slot.tokens >= 1.0
            else max(self._limits.gap_s, (1.0 - slot.tokens) * self._limits.pace_s)
        )

    def _back_off(self, key: Key, slot: _Slot, now: float, paced: float, changed: bool) -> None:
        limits = self._limits
        whole = min(limits.backoff_most_s, limits.backoff_first_s * 2.0 ** min(slot.failures - 1, 20))
        delay = whole * (0.8 + 0.2 * self._spread())
        first = max(limits.backoff_first_s, paced)
        slot.not_before = now + first
        self._wait(key, slot, slot.not_before if changed else max(slot.not_before, now + delay), changed)

    def _wait(self, key: Key, slot: _Slot, due: float, urgent: bool) -> None:
        if slot.due is not None:
            if urgent and not slot.urgent:
                due = min(due, slot.due)
            elif due >= slot.due:
                return
            urgent = urgent or slot.urgent
        heap = self._heaps[urgent]
        slot.due, slot.urgent = due, urgent
        heapq.heappush(heap, (due, next(self._order), key))
        if len(heap) > 4 * len(self._slots) + 64:
            # What was brought forward goes: the heap stays in proportion to the keys.
            heap[:] = [item for item in heap if self._valid(item, urgent)]
            heapq.heapify(heap)
