"""What an answer has given so far, choice by choice: all that another pod needs to go on with it. Pure."""

from array import array
from collections.abc import Sequence

from kvferry_wire.leg import ChoiceState
from kvferry_wire.limits import Limits

_ID_LIMIT = 2**32


class IdBudget:
    """Room for the ids that all answers under way at one router keep; their flows share it."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.resume_ids
        self.held = 0

    def take(self, count: int, *, must: bool = False) -> bool:
        """Whether there was room; nothing is taken when not. ``must``: a few that an answer cannot begin without."""
        if not must and self.held + count > self._most:
            return False
        self.held += count
        return True

    def give_back(self, count: int) -> None:
        assert count <= self.held
        self.held -= count


class Given:
    """Ids, counted and kept, and characters sent, of each choice.

    Ids count as soon as their frame is here. They are dropped, and only counted from then on, when there is no more
    room for them: such an answer cannot be resumed.
    """

    def __init__(self, choices: Sequence[ChoiceState], limits: Limits, budget: IdBudget) -> None:
        self._budget = budget
        self._most = limits.resume_ids_per_request
        self._ids = [array("I", choice.emitted) for choice in choices]
        self._counts = [len(choice.emitted) for choice in choices]
        self._chars = [choice.chars_sent for choice in choices]
        self._marks: list[tuple[int, int]] = []
        self._held = 0
        self.kept = True
        self.mark()

    def __len__(self) -> int:
        """Choices."""
        return len(self._counts)

    def count(self, choice: int) -> int:
        """Ids of one choice so far."""
        return self._counts[choice]

    @property
    def tokens(self) -> int:
        """Ids of all choices so far."""
        return sum(self._counts)

    def take(self, choice: int, ids: Sequence[int], chars: int, *, must: bool = False) -> bool:
        """Add ids and characters of a choice; false, with nothing added, when they cannot be any."""
        if chars < 0 or any(not 0 <= token < _ID_LIMIT for token in ids):
            return False
        self._counts[choice] += len(ids)
        self._chars[choice] += chars
        if self.kept and ids:
            if self._held + len(ids) <= self._most and self._budget.take(len(ids), must=must):
                self._held += len(ids)
                self._ids[choice].extend(ids)
            else:
                self.forget()
        return True

    def first(self, ids: Sequence[int]) -> bool:
        """Add the first id of each choice that has none; false when they contradict what is there."""
        if len(ids) != len(self._counts):
            return False
        pairs = list(zip(ids, self._ids, strict=True))
        if any(not 0 <= token < _ID_LIMIT or (kept and kept[0] != token) for token, kept in pairs):
            return False
        return all(self.take(choice, (token,), 0, must=True) for choice, (token, kept) in enumerate(pairs) if not kept)

    def mark(self) -> None:
        """A leg begins here."""
        self._marks = list(zip(self._counts, self._chars, strict=True))

    def rewind(self) -> None:
        """Forget what came since the last mark."""
        if self.kept:
            dropped = self.tokens - sum(count for count, _ in self._marks)
            self._held -= dropped
            self._budget.give_back(dropped)
            for ids, (count, _) in zip(self._ids, self._marks, strict=True):
                del ids[count:]
        self._counts = [count for count, _ in self._marks]
        self._chars = [chars for _, chars in self._marks]

    def states(self) -> tuple[ChoiceState, ...]:
        """What each choice has given, as the next leg's input. Only while the ids are kept."""
        assert self.kept
        return tuple(
            ChoiceState(emitted=tuple(ids), chars_sent=chars) for ids, chars in zip(self._ids, self._chars, strict=True)
        )

    def forget(self) -> None:
        """Keep no ids from now on."""
        self.release()
        self.kept = False
        for ids in self._ids:
            del ids[:]

    def release(self) -> None:
        """Give the room back: the answer is over."""
        self._budget.give_back(self._held)
        self._held = 0
