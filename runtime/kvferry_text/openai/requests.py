"""What a client may send to ``/v1/chat/completions`` and ``/v1/completions``.

Types are strict: no string becomes a number, a boolean is no integer, NaN and infinity are refused. Fields that are
known but not supported are in ``parameters``; they are taken out before these models see a body. Models of requests
keep prompt text out of their ``repr``.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from kvferry_text.errors import json_type, shown
from kvferry_wire.limits import Limits

SEED_MIN = -(2**63)
SEED_MAX = 2**63 - 1
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat answer may fill the context
USER_CHARS = 512
TOP_K_MAX = 2**31 - 1


def _limits(info: ValidationInfo) -> Limits:
    limits = info.context
    assert isinstance(limits, Limits), "requests are validated with Limits as their context"
    return limits


def _fault(message: str) -> PydanticCustomError:
    # The first text is a template for the values: text of ours goes in as a value, so that its braces stay.
    return PydanticCustomError("kvferry", "{text}", {"text": message})


def _check_content(value: object, info: ValidationInfo) -> str:
    """A string, or a list of text parts, which are joined with newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _fault(f"must be a string or an array of text parts, not {json_type(value)}")
    cap = _limits(info).content_parts
    if not 1 <= len(value) <= cap:
        raise _fault(f"must have 1 to {cap} parts, not {len(value)}")
    return "\n".join(_part_text(index, part) for index, part in enumerate(value))


def _part_text(index: int, part: object) -> str:
    if not isinstance(part, dict):
        raise _fault(f"part {index} must be an object with type 'text', not {json_type(part)}")
    if part.get("type") != "text":
        raise _fault(f"part {index} has type {shown(part.get('type'))}; only 'text' is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise _fault(f"part {index}: text must be a string, not {json_type(text)}")
    extra = sorted(set(part) - {"type", "text"})
    if extra:
        raise _fault(f"part {index} has the unknown field {shown(extra[0])}; known are type and text")
    return text


def _check_prompt(value: object, info: ValidationInfo) -> str | tuple[int, ...]:
    """Text, or token ids; either may be wrapped in a list of one. The vocabulary is checked later."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _fault(f"must be a string or an array of token ids, not {json_type(value)}")
    if not value:
        raise _fault("must not be empty")
    if len(value) > _limits(info).text_chars:
        raise _fault(f"has {len(value)} token ids; at most {_limits(info).text_chars} are accepted")
    if set(map(type, value)) == {int}:
        return tuple(value)
    if all(isinstance(item, str | list) for item in value):
        raise _fault(f"one prompt per request is supported, not {len(value)}")
    index = next(index for index, item in enumerate(value) if type(item) is not int)
    raise _fault(f"must be a string or an array of token ids; element {index} is {json_type(value[index])}")


def _check_stop(value: object, info: ValidationInfo) -> tuple[str, ...]:
    limits = _limits(info)
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _fault(f"must be a string or an array of strings, not {json_type(value)}")
    if len(stops) > limits.stop_strings:
        raise _fault(f"has {len(stops)} strings; at most {limits.stop_strings} are accepted")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise _fault(f"element {index} must be a string, not {json_type(stop)}")
        if not 1 <= len(stop) <= limits.stop_string_chars:
            raise _fault(f"element {index} has {len(stop)} characters; 1 to {limits.stop_string_chars} are accepted")
    return tuple(dict.fromkeys(stops))


def _check_stop_ids(value: object, info: ValidationInfo) -> tuple[int, ...]:
    cap = _limits(info).stop_token_ids
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _fault(f"must be an array of token ids, not {json_type(value)}")
    if len(value) > cap:
        raise _fault(f"has {len(value)} ids; at most {cap} are accepted")
    for index, item in enumerate(value):
        if type(item) is not int:
            raise _fault(f"element {index} must be a token id, not {json_type(item)}")
    return tuple(dict.fromkeys(value))


def _check_choices(value: int | None, info: ValidationInfo) -> int | None:
    cap = _limits(info).choices
    if value is not None and not 1 <= value <= cap:
        raise _fault(f"must be 1 to {cap}, not {shown(value)}")
    return value


Number = Annotated[float | None, Field(allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """``stream_options``: whether the last chunk of a stream brings usage."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None


class ChatMessage(BaseModel):
    """One message of a conversation; ``content`` is text after validation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_check_content)] = Field(repr=False)
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = None


class GenerationRequest(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, AfterValidator(_check_choices)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    temperature: Annotated[Number, Field(ge=0, le=2)] = None
    top_p: Annotated[Number, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=TOP_K_MAX)] = None
    min_p: Annotated[Number, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=SEED_MIN, le=SEED_MAX)] = None
    stop: Annotated[tuple[str, ...], PlainValidator(_check_stop)] = Field(default=(), repr=False)
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_check_stop_ids)] = ()
    ignore_eos: bool | None = None
    user: Annotated[str | None, Field(max_length=USER_CHARS)] = Field(default=None, repr=False)  # accepted, not used


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, repr=False)]


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[str | tuple[int, ...], PlainValidator(_check_prompt)] = Field(repr=False)
    best_of: int | None = None


REQUESTS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
}


def field_names(model: type[BaseModel]) -> frozenset[str]:
    """The field names of a request model."""
    return frozenset(model.model_fields)
