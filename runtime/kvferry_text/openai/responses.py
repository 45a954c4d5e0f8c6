"""The shape of what a client gets from ``/v1/chat/completions`` and ``/v1/completions``.

The extension ``stop_reason`` says what stopped a choice whose ``finish_reason`` is ``stop``: ``null`` for the model's
end-of-sequence token, the string for a stop string, the integer for an entry of ``stop_token_ids``.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]
StopReason = str | int | None


class _Body(BaseModel):
    # Fields are written in the order of declaration, and only those that were given.
    model_config = ConfigDict(frozen=True, strict=True)


class PromptTokensDetails(_Body):
    cached_tokens: int


class Usage(_Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, *, prompt: int, completion: int, cached: int) -> "Usage":
        """Usage of one request: tokens of its prompt (once), of all its choices, and of the prompt's cached part."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class AssistantMessage(_Body):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Body):
    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: FinishReason
    stop_reason: StopReason


class ChatCompletion(_Body):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage


class Delta(_Body):
    """The role chunk gives role and content, a text chunk content, the finish chunk neither."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(_Body):
    index: int
    delta: Delta
    logprobs: None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None


class ChatChunk(_Body):
    """``usage`` is given only if the client asked for it: null before the last chunk, whose ``choices`` are empty."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None = None


class CompletionChoice(_Body):
    """Of a whole completion and of a chunk, whose ``finish_reason`` is null until the last."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None


class Completion(_Body):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None
