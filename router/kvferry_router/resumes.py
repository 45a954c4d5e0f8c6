"""What one router spends on resumes over all requests, and the requests that it tries no more. Pure."""

from hashlib import blake2b

from kvferry_wire.leg import Leg
from kvferry_wire.limits import Limits


class ResumeBudget:
    """A bucket of resumes that fills with time: a lost pool is not asked for all its answers in the same moment."""

    def __init__(self, limits: Limits) -> None:
        self._per_s = limits.resumes_per_s
        self._most = float(limits.resume_burst)
        self._left = self._most
        self._at: float | None = None

    def take(self, now: float) -> bool:
        """Whether one more answer may be resumed now."""
        if self._at is not None:
            self._left = min(self._most, self._left + self._per_s * (now - self._at))
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Suspects:
    """Requests that were given up because engine after engine was lost on them, known again by tenant and prompt."""

    def __init__(self, limits: Limits) -> None:
        self._remember_s = limits.suspect_s
        self._most = limits.suspects
        self._until: dict[bytes, float] = {}  # by digest, oldest first

    def __len__(self) -> int:
        return len(self._until)

    def add(self, leg: Leg, now: float) -> None:
        self._until.pop(name := _digest(leg), None)
        self._until[name] = now + self._remember_s
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def holds(self, leg: Leg, now: float) -> bool:
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        return bool(self._until) and _digest(leg) in self._until


def _digest(leg: Leg) -> bytes:
    digest = blake2b(leg.extras.canonical(), digest_size=16)
    for token in leg.prompt_ids:
        digest.update(token.to_bytes(4, "little"))
    return digest.digest()
