"""Which pairs of pods do not get KV across, so that they are left alone for a while. Pure.

A pair is closed (in use) until ``Limits.pair_failures`` transfers in a row have failed for a reason that lies between
the two; then it is open (not chosen) for ``pair_open_s``, doubled with each further failure. After that it is half
open: one request tries it, and closes it or opens it again. Another life of either pod is another pair.
"""

import enum
from dataclasses import dataclass

from kvferry_wire.limits import Limits

# Of the reasons why KV was not ferried: those that lie between two engines, not in one request or in one engine.
BETWEEN_PODS = frozenset(
    {
        "mac",
        "mismatch",
        "no_backend",
        "connect",
        "peer_dead",
        "lease_expired",
        "lease_unknown",
        "read_error",
        "checksum",
        "deadline",
    }
)


class Breaker(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two lives: names and incarnations."""

    prefill: str
    decode: str
    prefill_life: str = ""
    decode_life: str = ""


@dataclass(slots=True)
class _Record:
    failures: int = 0  # in a row
    until: float = 0.0  # open, or tried by one request, before then


class PairBreakers:
    """All pairs that have failed; at most ``Limits.pairs`` of them, the oldest go first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._records: dict[Pair, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def state(self, pair: Pair, now: float) -> Breaker:
        record = self._records.get(pair)
        if record is None or record.failures < self._limits.pair_failures:
            return Breaker.CLOSED
        return Breaker.OPEN if now < record.until else Breaker.HALF_OPEN

    def barred(self, now: float) -> frozenset[Pair]:
        """Pairs that no request may be given now."""
        return frozenset(pair for pair in self._records if self.state(pair, now) is Breaker.OPEN)

    def chosen(self, pair: Pair, now: float) -> None:
        """A request is given to this pair: of a half open one, the only request until it has a result."""
        if self.state(pair, now) is Breaker.HALF_OPEN:
            self._records[pair].until = now + self._limits.pair_trial_s

    def result(self, pair: Pair, reason: str, now: float) -> None:
        """How a transfer between the two went; no reason means that it went well."""
        if not reason:
            self._records.pop(pair, None)
        elif reason in BETWEEN_PODS:
            record = self._records.pop(pair, None) or _Record()
            record.failures += 1
            opened = record.failures - self._limits.pair_failures
            if opened >= 0:
                pause = self._limits.pair_open_s * (1 << min(opened, 16))
                record.until = now + min(pause, self._limits.pair_open_cap_s)
            self._records[pair] = record
            while len(self._records) > self._limits.pairs:
                del self._records[next(iter(self._records))]
