"""Who works: leadership by a Lease, as a table of states. Pure: times are arguments, calls are effects.

    candidate --(no holder, or its Lease stood still for its whole duration)--> leader
    leader ----(not renewed for ``renew_deadline_s``, or another one holds it)--> lost       (the process ends)
    leader ----(asked to stop)--> released

Expiry is judged by this process's own clock: a Lease is expired when nothing about it has changed for its duration
*since we saw it*, whatever times its holder wrote into it. A leader counts from the moment it *sent* its last
successful renewal, and stops writing ``duration_s - renew_deadline_s`` before anybody else may take over: so long a
request that is under way has time to end.
"""

from typing import Literal

import msgspec

State = Literal["candidate", "leader", "lost", "released"]


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    duration_s: float = 15.0  # others take over when a Lease stood still for so long
    renew_deadline_s: float = 10.0  # the holder stops when it could not renew for so long
    retry_s: float = 2.0  # between renewals, and between looks of those who wait

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_deadline_s < self.duration_s:
            raise ValueError(f"Lease times: 0 < retry < renew deadline < duration is needed; got {self}")


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What of a Lease decides. ``version`` is empty for one that does not exist."""

    holder: str = ""
    duration_s: float = 0.0
    acquired: str = ""  # as written, for people
    renewed: str = ""
    transitions: int = 0
    version: str = ""


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """Write this record: a new Lease where its version is empty, else exactly over that version."""

    record: LeaseRecord


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """Look at the Lease."""


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to do for so long."""

    seconds: float


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """Leadership has ended for good in this process."""

    why: str


Step = Write | Read | Sleep | Over


class Election:
    """One process's part in the election. ``identity`` must be unique to the process."""

    def __init__(self, identity: str, times: LeaseTimes, now: float) -> None:
        self.identity = identity
        self.state: State = "candidate"
        self.why = ""
        self._times = times
        self._seen: LeaseRecord | None = None
        self._seen_at = now  # when it last changed before our eyes
        self._next = now  # when the next call is due
        self._held_since_sent = now  # leader: when the last successful renewal was sent

    # ---- what to do

    def step(self, now: float, stamp: str) -> Step:
        """The next thing to do. ``stamp`` is the time of day, for people."""
        if self.state in ("lost", "released"):
            return Over(why=self.why)
        if self.state == "leader" and now >= self.holds_until:
            return self._lose(f"the Lease could not be renewed for {self._times.renew_deadline_s:g} s")
        if now < self._next:
            return Sleep(seconds=min(self._next - now, self._times.retry_s))
        if self._seen is None:
            return Read()
        if self.state == "leader":
            return Write(record=self._mine(self._seen, stamp))
        if self._free(self._seen, now):
            return Write(record=self._taken(self._seen, stamp))
        return Read()

    @property
    def holds_until(self) -> float:
        """Leader: the time after which it writes nothing any more."""
        return self._held_since_sent + self._times.renew_deadline_s

    def may_write(self, now: float) -> bool:
        """Whether this process may change anything in the cluster now."""
        return self.state == "leader" and now < self.holds_until

    def release(self, now: float, stamp: str) -> LeaseRecord | None:
        """Stop for good. The record to write so that others need not wait; ``None`` where there is nothing to give."""
        was_leader = self.may_write(now)
        if self.state != "lost":
            self.state, self.why = "released", "asked to stop"
        if not was_leader or self._seen is None:
            return None
        return msgspec.structs.replace(self._mine(self._seen, stamp), holder="", duration_s=1.0)

    # ---- what came of it

    def found(self, record: LeaseRecord | None, now: float) -> None:
        """A look has told this; ``None``: there is no Lease."""
        record = LeaseRecord() if record is None else record
        if self._seen is None or record != self._seen:
            self._seen, self._seen_at = record, now
        if self.state == "leader" and record.holder != self.identity:
            self._lose(f"{record.holder or 'nobody'} holds the Lease now")
        elif self.state == "candidate":
            # At the latest when it expires, if nothing about it changes until then.
            expires = self._seen_at + record.duration_s
            self._next = now if self._free(record, now) else min(now + self._times.retry_s, expires)
        # A leader that had to look writes again at once.

    def written(self, record: LeaseRecord, sent_at: float, now: float) -> None:
        """A write succeeded; ``record`` is what the server has now."""
        self._seen, self._seen_at = record, now
        if self.state in ("lost", "released"):
            return
        self.state = "leader"
        self._held_since_sent = sent_at
        self._next = now + self._times.retry_s

    def conflicted(self, now: float) -> None:
        """A write came too late: somebody else wrote. Look again."""
        self._seen = None
        self._next = now if self.state == "leader" else now + self._times.retry_s

    def failed(self, now: float) -> None:
        """A call was not answered or was refused; what the server has is unknown. Try again soon."""
        if self.state == "leader":
            self._seen = None
        self._next = now + min(1.0, self._times.retry_s)

    # ---- inside

    def _free(self, record: LeaseRecord, now: float) -> bool:
        if not record.holder or not record.version:
            return True
        # Our own name in a Lease that this process does not hold: a write of ours that we took for failed.
        return record.holder == self.identity or now >= self._seen_at + record.duration_s

    def _mine(self, seen: LeaseRecord, stamp: str) -> LeaseRecord:
        return msgspec.structs.replace(
            seen,
            holder=self.identity,
            duration_s=self._times.duration_s,
            renewed=stamp,
            acquired=seen.acquired or stamp,
        )

    def _taken(self, seen: LeaseRecord, stamp: str) -> LeaseRecord:
        changed = seen.version != "" and seen.holder != self.identity
        return msgspec.structs.replace(
            self._mine(seen, stamp), acquired=stamp, transitions=seen.transitions + (1 if changed else 0)
        )

    def _lose(self, why: str) -> Over:
        self.state, self.why = "lost", why
        return Over(why=why)
