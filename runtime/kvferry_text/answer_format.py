"""The documents of an answer in each of the forms a client can ask for: chat or completion, streamed or whole."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvferry_text import sse
from kvferry_text.choice import ChoiceText
from kvferry_text.openai import responses
from kvferry_text.openai.responses import FinishReason, StopReason, Usage
from kvferry_text.sse import TextEvent
from kvferry_wire.leg import AnswerFormat


class AnswerForm(Protocol):
    """Bytes for the parts of an answer; those that are not streamed have no role, no text parts and no notes."""

    def role(self, index: int) -> bytes: ...

    def text(self, index: int, text: str) -> bytes: ...

    def end(self, choices: Sequence[ChoiceText], usage: Usage, notes: Sequence[str]) -> bytes: ...


def answer_form(answer: AnswerFormat) -> AnswerForm:
    """The form that the request asked for."""
    if not answer.stream:
        return WholeForm(answer)
    return ChatStreamForm(answer) if answer.kind == "chat" else CompletionStreamForm(answer)


class WholeForm:
    """One JSON body."""

    def __init__(self, answer: AnswerFormat) -> None:
        self._answer = answer

    def role(self, index: int) -> bytes:
        return b""

    def text(self, index: int, text: str) -> bytes:
        return b""

    def end(self, choices: Sequence[ChoiceText], usage: Usage, notes: Sequence[str]) -> bytes:
        make = self._chat if self._answer.kind == "chat" else self._completion
        return sse.document(make(choices, usage))

    def _chat(self, choices: Sequence[ChoiceText], usage: Usage) -> responses.ChatCompletion:
        return responses.ChatCompletion(
            id=self._answer.response_id,
            object="chat.completion",
            created=self._answer.created,
            model=self._answer.model,
            choices=tuple(
                responses.ChatChoice(
                    index=index,
                    message=responses.AssistantMessage(role="assistant", content=choice.take_pending(), refusal=None),
                    logprobs=None,
                    finish_reason=_finish(choice),
                    stop_reason=choice.stop_reason,
                )
                for index, choice in enumerate(choices)
            ),
            usage=usage,
        )

    def _completion(self, choices: Sequence[ChoiceText], usage: Usage) -> responses.Completion:
        return responses.Completion(
            id=self._answer.response_id,
            object="text_completion",
            created=self._answer.created,
            model=self._answer.model,
            choices=tuple(
                responses.CompletionChoice(
                    index=index,
                    text=choice.take_pending(),
                    logprobs=None,
                    finish_reason=_finish(choice),
                    stop_reason=choice.stop_reason,
                )
                for index, choice in enumerate(choices)
            ),
            usage=usage,
        )


class _StreamForm:
    """What the two kinds of stream have in common. Text events are built once per choice and filled in."""

    def __init__(self, answer: AnswerFormat) -> None:
        self._answer = answer
        self._text_events: dict[int, TextEvent] = {}

    def role(self, index: int) -> bytes:
        return b""

    def text(self, index: int, text: str) -> bytes:
        if index not in self._text_events:
            self._text_events[index] = TextEvent(self._chunk((self._text_choice(index, TextEvent.PLACE),)))
        return self._text_events[index].with_text(text)

    def end(self, choices: Sequence[ChoiceText], usage: Usage, notes: Sequence[str]) -> bytes:
        parts = [
            self._event((self._finish_choice(index, _finish(choice), choice.stop_reason),))
            for index, choice in enumerate(choices)
        ]
        if self._answer.include_usage:
            parts.append(self._event((), usage))
        parts += [sse.comment(f"kvferry {note}") for note in notes]
        return b"".join([*parts, sse.DONE])

    def _event(self, choices: tuple[Any, ...], usage: Usage | None = None) -> bytes:
        return sse.event(sse.document(self._chunk(choices, usage)))

    def _common(self, usage: Usage | None) -> dict[str, Any]:
        common: dict[str, Any] = {
            "id": self._answer.response_id,
            "created": self._answer.created,
            "model": self._answer.model,
        }
        # A client that did not ask for usage sees no such field; one that did sees null until the last chunk.
        return {**common, "usage": usage} if self._answer.include_usage else common

    def _chunk(
        self, choices: tuple[Any, ...], usage: Usage | None = None
    ) -> responses.ChatChunk | responses.Completion:
        raise NotImplementedError

    def _text_choice(self, index: int, text: str) -> object:
        raise NotImplementedError

    def _finish_choice(self, index: int, finish: FinishReason, stop_reason: StopReason) -> object:
        raise NotImplementedError


class ChatStreamForm(_StreamForm):
    """``chat.completion.chunk`` events."""

    def role(self, index: int) -> bytes:
        delta = responses.Delta(role="assistant", content="")
        return self._event((self._choice(index, delta),))

    def _chunk(self, choices: tuple[Any, ...], usage: Usage | None = None) -> responses.ChatChunk:
        return responses.ChatChunk(object="chat.completion.chunk", choices=choices, **self._common(usage))

    def _choice(self, index: int, delta: responses.Delta) -> responses.ChatChunkChoice:
        return responses.ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)

    def _text_choice(self, index: int, text: str) -> responses.ChatChunkChoice:
        return self._choice(index, responses.Delta(content=text))

    def _finish_choice(self, index: int, finish: FinishReason, stop_reason: StopReason) -> responses.ChatChunkChoice:
        return responses.ChatChunkChoice(
            index=index, delta=responses.Delta(), logprobs=None, finish_reason=finish, stop_reason=stop_reason
        )


class CompletionStreamForm(_StreamForm):
    """``text_completion`` events."""

    def _chunk(self, choices: tuple[Any, ...], usage: Usage | None = None) -> responses.Completion:
        return responses.Completion(object="text_completion", choices=choices, **self._common(usage))

    def _text_choice(self, index: int, text: str) -> responses.CompletionChoice:
        return responses.CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)

    def _finish_choice(self, index: int, finish: FinishReason, stop_reason: StopReason) -> responses.CompletionChoice:
        return responses.CompletionChoice(
            index=index, text="", logprobs=None, finish_reason=finish, stop_reason=stop_reason
        )


def _finish(choice: ChoiceText) -> FinishReason:
    assert choice.finish is not None, "an answer ends when every choice has finished"
    return choice.finish
