"""Writes one answer for the client: token ids in, ready-made bytes out.

A stream has, in this order: a role chunk per choice (chat), text chunks, then in ``End.data`` one finish chunk per
choice with an empty delta, the usage chunk if asked for, and ``data: [DONE]``. An answer that is not streamed is one
body in ``End.data``. Cutting the ids into other pushes changes where text chunks begin, never the text.

A leg that continues an answer brings the ids picked so far and how many characters of each choice's text the client
has; the writer replays the ids in silence up to there.

Stop strings count only in text that belongs to tokens after the first ``min_tokens``. Of a choice that ends, neither
the end-of-sequence or stop token nor the stop string is in the text.
"""

from collections.abc import Sequence

import msgspec

from kvferry_text.answer_format import AnswerForm, answer_form
from kvferry_text.choice import ChoiceText
from kvferry_text.openai.responses import Usage
from kvferry_text.tokenizer import TextTokenizer
from kvferry_wire.frames import End
from kvferry_wire.leg import Leg


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What a push let go.

    Attributes:
        data: whole SSE events; empty when text is held back or the answer is not streamed.
        chars: characters of the choice's text in ``data``.
        stopped: a stop string ended the choice, the engine does not know it yet.
        ids: the pushed ids that belong to the answer: all, or those up to the one that completed a stop string.
    """

    data: bytes = b""
    chars: int = 0
    stopped: bool = False
    ids: tuple[int, ...] = ()


class AnswerWriter:
    """One per leg on the decode pod.

    Call order: `opening`, `catch_up`, `push` as ids come, `end` once every choice has finished. What `opening` or
    `catch_up` would have given and was not asked for comes with the next push of its choice, or with the end.

    Raises:
        ValueError: on construction, when a choice's emitted ids do not have the characters said to be sent; from
            `push` and `end`, when the call breaks the order.
    """

    def __init__(self, leg: Leg, tokenizer: TextTokenizer) -> None:
        self._format = leg.format
        self._form: AnswerForm = answer_form(leg.format)
        self._prompt_tokens = len(leg.prompt_ids)
        self._resumed = leg.resumed
        self._role_due = leg.format.stream and not leg.format.role_sent
        self._ended = False
        # A completion continues its prompt; a chat answer is a text of its own.
        context = leg.prompt_ids if leg.format.kind == "completion" else ()
        self._choices = tuple(
            ChoiceText(leg.sampling, state, tokenizer.detokenizer(context), tokenizer.eos_token_ids)
            for state in leg.choices
        )

    def opening(self) -> bytes:
        """The role chunks of a chat stream, once; empty otherwise."""
        if not self._role_due:
            return b""
        self._role_due = False
        return b"".join(self._form.role(index) for index in range(len(self._choices)))

    def catch_up(self) -> list[tuple[int, Written]]:
        """Text of the replayed ids that the client has not got yet, and choices that a stop string ended among them.

        On a first leg this is the text of the token that prefill picked. Each comes once.
        """
        return [
            (index, self._written(index, ()))
            for index, choice in enumerate(self._choices)
            if choice.pending or choice.stopped_by_text
        ]

    def finished_at_start(self) -> bool:
        """Whether the replayed ids end every choice: nothing is to be computed, `end` can follow at once."""
        return self.finished()

    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self._choices)

    def finished_choices(self) -> frozenset[int]:
        """The choices that have ended; nothing may be pushed for them."""
        return frozenset(index for index, choice in enumerate(self._choices) if choice.finish is not None)

    def push(self, choice: int, ids: Sequence[int], finish: str | None, stop_token: int | None) -> Written:
        """Take newly picked ids of a choice.

        Args:
            choice: its index.
            ids: in order; may be empty.
            finish: why the choice ends with them, ``stop`` or ``length``; ``None`` while it goes on. With ``stop``
                the last id is the end-of-sequence or stop token.
            stop_token: the entry of ``stop_token_ids`` that ended it.

        After a stop string the engine may still have had ids under way: those are dropped, ``stopped`` is told again.
        """
        if self._ended:
            raise ValueError("the answer has ended")
        text = self._choices[choice]
        if text.stopped_by_text:
            return Written(stopped=True)
        if text.finish is not None:
            raise ValueError(f"choice {choice} has finished ({text.finish})")
        used = text.take(ids, finish, stop_token)
        return self._written(choice, tuple(ids[:used]), finished=finish is not None)

    def _written(self, index: int, ids: tuple[int, ...], *, finished: bool = False) -> Written:
        choice = self._choices[index]
        stopped = choice.stopped_by_text and not finished
        if not self._format.stream:
            return Written(stopped=stopped, ids=ids)
        text = choice.take_pending()
        data = self.opening() + self._form.text(index, text) if text else b""
        return Written(data=data, chars=len(text), stopped=stopped, ids=ids)

    def end(self, cached_tokens: int, recomputed: str = "") -> End:
        """The end of the answer; nothing can be pushed after it.

        Args:
            cached_tokens: of the prompt, for usage.
            recomputed: the reason, if KV was to be ferried and was computed again.

        A stream tells in comments what happened on its way.
        """
        if self._ended:
            raise ValueError("the answer has ended")
        unfinished = [index for index, choice in enumerate(self._choices) if choice.finish is None]
        if unfinished:
            raise ValueError(f"choices {unfinished} have not finished")
        self._ended = True
        completion = sum(choice.tokens for choice in self._choices)
        usage = Usage.of(prompt=self._prompt_tokens, completion=completion, cached=cached_tokens)
        told = (("recomputed", recomputed), ("resumed", self._resumed))
        notes = [f"{what}: {how}" for what, how in told if how]
        late = b""
        if self._format.stream:
            late = self.opening() + b"".join(
                self._form.text(index, text) for index, c in enumerate(self._choices) if (text := c.take_pending())
            )
        return End(
            data=late + self._form.end(self._choices, usage, notes),
            finish=tuple(str(choice.finish) for choice in self._choices),
            completion_tokens=completion,
            cached_tokens=cached_tokens,
            recomputed=recomputed,
        )

    def __repr__(self) -> str:
        return f"AnswerWriter({self._format.response_id}, choices={list(self._choices)}, ended={self._ended})"
