"""Finds stop strings in text that comes in pieces, and holds text back only while it may still become one.

The match that is complete first wins; of several complete at the same character, the longest. What comes out is the
same however the text is cut into pieces.
"""

from collections.abc import Sequence

import msgspec


class Fed(msgspec.Struct, frozen=True, array_like=True):
    """``text`` may go to the client; ``stop`` is the stop string that was found right after it."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Matches the stop strings of one choice with one Knuth-Morris-Pratt automaton each.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failures = tuple(_failures(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # per stop: the longest prefix of it that the text ends with
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""  # ends the text so far; a proper prefix of a stop string

    def feed(self, text: str) -> Fed:
        """Take the next piece of text. After a match the matcher is of no further use."""
        if not self._held and self._first_characters.isdisjoint(text):
            return Fed(text)
        for position, character in enumerate(text):
            stop = self._step(character)
            if stop is not None:
                before = self._held + text[: position + 1]
                self._held = ""
                return Fed(before[: len(before) - len(stop)], stop)
        whole = self._held + text
        cut = len(whole) - max(self._matched)
        self._held = whole[cut:]
        return Fed(whole[:cut])

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance all automata by one character; the longest stop string that it completes."""
        found: str | None = None
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._failures[index][matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = stop if found is None or len(stop) > len(found) else found
                matched = 0  # the text ends here
            self._matched[index] = matched
        return found


def _failures(stop: str) -> tuple[int, ...]:
    """Per position of a string, the length of the longest proper border of its prefix that ends there."""
    table = [0] * len(stop)
    for position in range(1, len(stop)):
        border = table[position - 1]
        while border and stop[border] != stop[position]:
            border = table[border - 1]
        table[position] = border + (stop[border] == stop[position])
    return tuple(table)
