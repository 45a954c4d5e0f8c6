"""The text of one choice of an answer: ids in, text and the reason of its end out."""

from collections.abc import Sequence
from typing import Literal

from kvferry_text.detokenizer import Detokenizer
from kvferry_text.openai.responses import FinishReason, StopReason
from kvferry_text.stop import StopMatcher
from kvferry_wire.leg import ChoiceState, Sampling


class ChoiceText:
    """Decodes, stops and counts one choice.

    Attributes:
        tokens: ids that belong to the answer, the one that ended it included.
        finish: ``None`` while the choice goes on.
        stop_reason: the stop string or the user's stop token that ended it.
        stopped_by_text: whether a stop string ended it.
        pending: text that may go to the client and was not taken yet.

    Raises:
        ValueError: on construction, when the emitted ids have fewer characters of text than were sent.
    """

    def __init__(
        self, sampling: Sampling, state: ChoiceState, detokenizer: Detokenizer, eos_token_ids: Sequence[int]
    ) -> None:
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._eos_token_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self._matcher = StopMatcher(sampling.stop) if sampling.stop else None
        self.tokens = 0
        self.finish: FinishReason | None = None
        self.stop_reason: StopReason = None
        self.stopped_by_text = False
        self._pieces: list[str] = []
        self._replay(state)

    def _replay(self, state: ChoiceState) -> None:
        """Take the ids emitted by earlier legs; judge where they end as the engine does."""
        for token_id in state.emitted:
            if self.finish is not None:
                break
            finish, stop_token = self._ending(token_id)
            self.take((token_id,), finish, stop_token)
        text = self.take_pending()
        if state.chars_sent > len(text):
            raise ValueError(
                f"{state.chars_sent} characters are said to be sent, but the {len(state.emitted)} emitted ids "
                f"let go {len(text)}"
            )
        if len(text) > state.chars_sent:
            self._pieces.append(text[state.chars_sent :])

    def _ending(self, token_id: int) -> tuple[Literal["stop", "length"] | None, int | None]:
        """How the next id ends the choice. An end-of-sequence id on the last allowed place is a natural end."""
        if self.tokens >= self._sampling.min_tokens:
            if token_id in self._eos_token_ids:
                return "stop", None
            if token_id in self._sampling.stop_token_ids:
                return "stop", token_id
        return ("length" if self.tokens + 1 >= self._sampling.max_tokens else None), None

    def take(self, ids: Sequence[int], finish: str | None, stop_token: int | None) -> int:
        """Add ids; returns how many of them belong to the answer (fewer than given after a stop string)."""
        last_has_text = finish != "stop"
        for position, token_id in enumerate(ids):
            self.tokens += 1
            if position < len(ids) - 1 or last_has_text:
                self._add(self._detokenizer.push(token_id))
            if self.stopped_by_text:
                return position + 1
        if finish is not None:
            self._end(finish, stop_token)
        return len(ids)

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._matcher is None or self.tokens <= self._sampling.min_tokens:
            self._pieces.append(text)
            return
        fed = self._matcher.feed(text)
        self._pieces.append(fed.text)
        if fed.stop is not None:
            self.finish, self.stop_reason, self.stopped_by_text = "stop", fed.stop, True

    def _end(self, finish: str, stop_token: int | None) -> None:
        if finish not in ("stop", "length"):
            raise ValueError(f"finish is {finish!r}; stop and length are known")
        # What is left of an incomplete character can complete no stop string worth waiting for: stops hold no U+FFFD.
        self._add(self._detokenizer.flush())
        if self.stopped_by_text:
            return
        if self._matcher is not None:
            self._pieces.append(self._matcher.flush())
        self.finish, self.stop_reason = ("stop" if finish == "stop" else "length"), stop_token

    @property
    def pending(self) -> bool:
        return any(self._pieces)

    def take_pending(self) -> str:
        """The text that may go to the client, once."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def __repr__(self) -> str:
        return f"ChoiceText(tokens={self.tokens}, finish={self.finish}, pending={sum(map(len, self._pieces))})"
