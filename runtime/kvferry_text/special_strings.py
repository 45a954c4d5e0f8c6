"""Finds, in text that must stay text, what a tokenizer would take for a special token."""

import re
from collections.abc import Collection, Sequence

Span = tuple[int, int]


class SpecialStrings:
    """The strings of a tokenizer's special tokens, and their parts that could meet at the edges of texts."""

    def __init__(self, strings: Collection[str]) -> None:
        longest_first = sorted(filter(None, strings), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = frozenset(string[:cut] for string in longest_first for cut in range(1, len(string)))
        self._endings = frozenset(string[cut:] for string in longest_first for cut in range(1, len(string)))
        self._reach = max(map(len, longest_first), default=1) - 1

    def suspicious(self, text: str) -> list[Span]:
        """Spans, in order and apart, that hold such a string, or a part of one at an edge of the text.

        An edge could complete a string together with what is put beside the text. Edges are those of the text without
        surrounding whitespace, since chat templates often trim.
        """
        if self._whole is None:
            return []
        spans = [match.span() for match in self._whole.finditer(text)]
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        reach = min(self._reach, end - start)
        for cut in range(reach, 0, -1):
            if text[end - cut : end] in self._beginnings:
                spans.append((end - cut, end))
                break
        for cut in range(reach, 0, -1):
            if text[start : start + cut] in self._endings:
                spans.append((start, start + cut))
                break
        return merged(spans)


def merged(spans: Sequence[Span]) -> list[Span]:
    """Overlapping spans joined, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
