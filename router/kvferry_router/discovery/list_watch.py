"""When to list and when to watch: a table of phases, with back-off. Pure.

List once, then watch from the list's version, again and again from the last version heard. Only when the API server has
forgotten that version is listed anew. Whatever fails is tried again after a pause that doubles up to a cap and starts
over once a watch has told something or lived for a while.
"""

import enum
from dataclasses import dataclass
from random import Random

from kvferry_wire.limits import Limits

_SHORT_S = 0.5  # a watch that ends sooner, having told nothing, counts as a failure
_STEADY_S = 5.0  # one that lived for so long was none
_RETRY_AFTER_CAP_S = 60.0


class Phase(enum.Enum):
    """What is under way."""

    LISTING = "listing"
    WATCHING = "watching"
    BEFORE_LIST = "pausing before a list"
    BEFORE_WATCH = "pausing before a watch"


class Heard(enum.Enum):
    """What has happened."""

    LISTED = "listed"
    WORD = "word"  # an event, or a bookmark
    ENDED = "ended"  # the watch, in order
    FAILED = "failed"
    GONE = "gone"  # the version is too old, or what came cannot be believed
    DUE = "due"  # the pause is over


_P, _H = Phase, Heard
TRANSITIONS: dict[tuple[Phase, Heard], Phase] = {
    (_P.LISTING, _H.LISTED): _P.WATCHING,
    (_P.LISTING, _H.FAILED): _P.BEFORE_LIST,
    (_P.WATCHING, _H.WORD): _P.WATCHING,
    (_P.WATCHING, _H.ENDED): _P.BEFORE_WATCH,
    (_P.WATCHING, _H.FAILED): _P.BEFORE_WATCH,
    (_P.WATCHING, _H.GONE): _P.BEFORE_LIST,
    (_P.BEFORE_LIST, _H.DUE): _P.LISTING,
    (_P.BEFORE_WATCH, _H.DUE): _P.WATCHING,
}


class IllegalStepError(RuntimeError):
    """An event that the phase does not allow: the shell is at fault. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class ListNow:
    """List everything."""


@dataclass(frozen=True, slots=True)
class WatchFrom:
    """Watch from a version on, for so many seconds."""

    version: str
    seconds: int


@dataclass(frozen=True, slots=True)
class PauseUntil:
    """Do nothing until then."""

    at: float


class ListWatch:
    """One list and its watches. Times are seconds of one clock that never goes back."""

    def __init__(self, limits: Limits, rng: Random, now: float) -> None:
        self._limits = limits
        self._rng = rng
        self.phase = Phase.LISTING
        self._version = ""
        self._failures = 0  # in a row
        self._started_at = now  # of the watch
        self._told = False  # whether the watch has told anything
        self._open = False  # whether the API server has begun to answer the watch
        self._word_at = now  # the last word of the API server
        self._reached_at = now  # the last time that it was there to say one
        self._resume_at = now

    def __repr__(self) -> str:
        return f"ListWatch({self.phase.value}, version={self._version!r}, failures={self._failures})"

    def step(self, now: float) -> ListNow | WatchFrom | PauseUntil:
        """What is to be done now. A watch begins with this call."""
        if self.phase is Phase.LISTING:
            return ListNow()
        if self.phase is Phase.WATCHING:
            self._started_at, self._told = now, False
            return WatchFrom(self._version, max(1, round(self._limits.api_watch_s * self._rng.uniform(0.8, 1.0))))
        return PauseUntil(self._resume_at)

    def listed(self, version: str, now: float) -> None:
        """The list has come."""
        self._move(Heard.LISTED)
        self._version = version
        self._word_at = self._reached_at = now

    def opened(self, now: float) -> None:
        """The API server has begun to answer the watch."""
        if self.phase is not Phase.WATCHING:
            raise IllegalStepError(f"a watch began while {self.phase.value}")
        self._open, self._word_at = True, now

    def word(self, version: str, now: float) -> None:
        """An event or a bookmark has come; ``version`` is that of its object, empty if it has none."""
        self._move(Heard.WORD)
        self._version = version or self._version
        self._word_at, self._told, self._failures = now, True, 0

    def ended(self, now: float) -> None:
        """The watch has ended in order, as each does in time."""
        self._move(Heard.ENDED)
        self._word_at = now
        self._rest(now, failed=not self._told and now - self._started_at < _SHORT_S)

    def failed(self, now: float, retry_after_s: float = 0.0) -> None:
        """A list or a watch has failed, or broken off; ``retry_after_s`` is the API server's wish."""
        self._move(Heard.FAILED)
        self._rest(now, failed=True, at_least=min(retry_after_s, _RETRY_AFTER_CAP_S))

    def gone(self, now: float) -> None:
        """What the watch would tell cannot be had from this version on: everything is listed anew."""
        self._move(Heard.GONE)
        self._rest(now, failed=True)

    def due(self) -> None:
        """The pause is over."""
        self._move(Heard.DUE)

    def away(self, now: float) -> bool:
        """Whether the API server has been out of reach for too long to be believed on what may have changed."""
        return not self._open and now - self._reached_at >= self._limits.api_away_s

    def silence(self, now: float) -> float:
        """Seconds since the API server's last word."""
        return max(0.0, now - self._word_at)

    def _rest(self, now: float, *, failed: bool, at_least: float = 0.0) -> None:
        if self._open:
            self._open, self._reached_at = False, now
        if self.phase is Phase.BEFORE_WATCH and now - self._started_at >= _STEADY_S:
            self._failures = 0
        pause = 0.0
        if failed:
            doubled = self._limits.api_backoff_s * 2.0 ** min(self._failures, 16)
            pause = min(doubled, self._limits.api_backoff_cap_s) * self._rng.uniform(0.5, 1.0)
            self._failures += 1
        self._resume_at = max(now + max(pause, at_least), self._started_at + self._limits.api_spacing_s)

    def _move(self, heard: Heard) -> None:
        after = TRANSITIONS.get((self.phase, heard))
        if after is None:
            raise IllegalStepError(f"{heard.value} while {self.phase.value}")
        self.phase = after
