"""The lease table behind a lock and a clock: what the engine, the control thread and the data plane call.

The table is authoritative for all three at once: a lease exists when `grant` returns, and a read asks the very table
that expiry is judged in. A call holds the lock for microseconds.
"""

import threading
import time
from collections.abc import Callable

from kvferry_runtime.core.messages import GrantLease, LeaseEnded, LeaseTaken
from kvferry_runtime.transfer.lease import LeaseTable, Lookup
from kvferry_wire.control import Answers, Failed, LeaseAnswer, LeaseRef, Release, Renew
from kvferry_wire.limits import Limits


class LeaseDesk:
    """All calls may come from any thread.

    Args:
        post: hears of each lease's first renewal and of its end, once each; called outside the lock, on the caller's
            thread.
        clock: seconds, monotonic; a seam for tests.
    """

    def __init__(
        self,
        *,
        incarnation: bytes,
        epoch: int,
        limits: Limits,
        post: Callable[[LeaseTaken | LeaseEnded], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = LeaseTable(incarnation=incarnation, epoch=epoch, limits=limits)
        self._post = post
        self._clock = clock
        self._lock = threading.Lock()

    def grant(self, grant: GrantLease) -> None:
        """See `LeaseTable.grant`."""
        with self._lock:
            self._table.grant(grant, self._clock())

    def answered(self, lease_id: int, delivered: bool) -> None:
        """See `LeaseTable.answered`."""
        with self._lock:
            self._table.answered(lease_id, delivered, self._clock())
        self._tell()

    def withdraw(self, lease_id: int) -> bool:
        """See `LeaseTable.withdraw`."""
        with self._lock:
            withdrawn = self._table.withdraw(lease_id, self._clock())
        self._tell()
        return withdrawn

    def withdraw_all(self) -> None:
        """See `LeaseTable.withdraw_all`."""
        with self._lock:
            self._table.withdraw_all(self._clock())
        self._tell()

    def raise_epoch(self, epoch: int) -> None:
        """See `LeaseTable.raise_epoch`."""
        with self._lock:
            self._table.raise_epoch(epoch, self._clock())
        self._tell()

    def serve(self, reader: bytes, message_id: int, body: Renew | Release | Failed) -> Answers:
        """Answer a reader's message."""
        with self._lock:
            now = self._clock()
            match body:
                case Renew(leases=leases):
                    answers = tuple(self._table.renew(ref, now) for ref in leases)
                case Release(lease=ref):
                    answers = (self._table.release(ref, reader, message_id, now),)
                case Failed(lease=ref):
                    answers = (self._table.failed(ref, now),)
        self._tell()
        return Answers(answers=answers)

    def release(self, reader: bytes, message_id: int, ref: LeaseRef) -> LeaseAnswer:
        """A `Release` that came behind the last read of the data plane. See `LeaseTable.release`."""
        return self.serve(reader, message_id, Release(lease=ref)).answers[0]

    def lookup(self, ref: LeaseRef) -> Lookup:
        """See `LeaseTable.lookup`."""
        with self._lock:
            return self._table.lookup(ref)

    def judge_expiry(self, now: float) -> None:
        """End what had expired by `now`, a reading of the clock from before the socket was last drained."""
        with self._lock:
            ended = self._table.tick(now)
        for end in ended:
            self._post(end)

    def live(self) -> int:
        """Leases that keep blocks."""
        with self._lock:
            return self._table.live()

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Live, granted, and ended by why."""
        with self._lock:
            return self._table.live(), self._table.granted, dict(self._table.ended)

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._table.epoch

    def check_integrity(self) -> None:
        """See `LeaseTable.check_integrity`."""
        with self._lock:
            self._table.check_integrity()

    def _tell(self) -> None:
        with self._lock:
            news: list[LeaseTaken | LeaseEnded] = [*self._table.take_taken(), *self._table.take_ended()]
        for each in news:
            self._post(each)
