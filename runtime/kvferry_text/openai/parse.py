"""Body bytes in, a validated request out; every fault of the body in one ``ApiError``.

Work is bounded: counts are capped before elements are looked at, and a message lists a few faults and counts the rest.
Where a JSON object names a key twice the last one counts, as in most JSON readers.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvferry_text import errors
from kvferry_text.errors import Fault, json_type, shown
from kvferry_text.openai.parameters import (
    MESSAGE_FIELDS,
    STREAM_OPTIONS,
    UNSUPPORTED,
    Kind,
    NeutralValues,
    is_neutral,
    unsupported,
)
from kvferry_text.openai.requests import (
    REQUESTS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    field_names,
)
from kvferry_wire.limits import Limits

_decode = msgspec.json.Decoder().decode

_MESSAGE_NAMES = field_names(ChatMessage)
_STREAM_NAMES = field_names(StreamOptions)

# A string under these fields may be prompt text: errors name its type and never show it.
_PRIVATE = frozenset({"messages", "prompt", "stop", "user", "content"})


_FAULTS = 64  # a body may be wrong in hundreds of thousands of places; looking on helps nobody


def parse_request(
    kind: Kind, body: bytes, limits: Limits, served_names: Collection[str]
) -> ChatRequest | CompletionRequest:
    """Validate a request body.

    Raises:
        ApiError: 413 for too many bytes, 404 for an unknown model, else 400 that names each field at fault.
    """
    fields = _json_object(body, limits)
    _check_model(fields, served_names)
    faults: list[Fault] = []
    kept = _known_fields(fields, "", field_names(REQUESTS[kind]), UNSUPPORTED[kind], faults)
    if isinstance(kept.get("stream_options"), dict):
        kept["stream_options"] = _known_fields(
            kept["stream_options"], "stream_options.", _STREAM_NAMES, STREAM_OPTIONS, faults
        )
    if kind == "chat":
        _check_messages(kept, limits, faults)
    request = _validate(kind, kept, limits, faults)
    if request is not None:
        faults += _cross_faults(request)
    if request is None or faults:
        raise errors.bad_fields(faults)
    return request


def _json_object(body: bytes, limits: Limits) -> dict[str, Any]:
    if len(body) > limits.body_bytes:
        raise errors.body_too_large(limits.body_bytes)
    try:
        value = _decode(body)
    except RecursionError:
        raise errors.bad_request("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # The decoder's messages name a position and never quote the body.
        raise errors.bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise errors.bad_request(f"the body must be a JSON object, not {json_type(value)}", code="invalid_json")
    return value


def _check_model(fields: Mapping[str, Any], served_names: Collection[str]) -> None:
    """An unknown model is answered as such, whatever else is wrong."""
    name = fields.get("model")
    if isinstance(name, str) and name and name not in served_names:
        raise errors.model_not_found(name)


def _known_fields(
    fields: Mapping[str, Any],
    prefix: str,
    supported: Collection[str],
    known: Mapping[str, NeutralValues],
    faults: list[Fault],
) -> dict[str, Any]:
    """The supported fields; adds a fault for each unknown one and each known one that asks for something."""
    kept = {}
    for name, value in fields.items():
        if name in supported:
            kept[name] = value
        elif len(faults) >= _FAULTS:
            break
        elif name not in known:
            param = prefix + (name if len(name) <= errors.ECHO_CHARS else name[: errors.ECHO_CHARS] + "...")
            faults.append(Fault(param, f"unknown parameter {shown(param)}", "unknown_parameter"))
        elif not is_neutral(value, known[name]):
            faults.append(unsupported(prefix + name, value, known[name]))
    return kept


def _check_messages(kept: dict[str, Any], limits: Limits, faults: list[Fault]) -> None:
    """Caps the count and takes neutral fields out of each message; leaves other shapes to the model."""
    messages = kept.get("messages")
    if not isinstance(messages, list):
        return
    if len(messages) > limits.messages:
        message = f"messages has {len(messages)} messages; at most {limits.messages} are accepted"
        raise errors.bad_fields([*faults, Fault("messages", message)])
    kept["messages"] = [
        _known_fields(message, f"messages[{index}].", _MESSAGE_NAMES, MESSAGE_FIELDS, faults)
        if isinstance(message, dict)
        else message
        for index, message in enumerate(messages)
    ]


def _validate(
    kind: Kind, kept: dict[str, Any], limits: Limits, faults: list[Fault]
) -> ChatRequest | CompletionRequest | None:
    try:
        return REQUESTS[kind].model_validate(kept, context=limits)
    except ValidationError as error:
        faults += [_fault(details) for details in error.errors(include_url=False, include_context=True)]
        return None


def _fault(details: ErrorDetails) -> Fault:
    """One of pydantic's errors, in the words of this API."""
    location, given = details["loc"], details["input"]
    param = str(location[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:])
    if details["type"] == "missing":
        return Fault(param, f"{param} is required", "missing_required_parameter")
    if details["type"] == "kvferry":
        return Fault(param, f"{param} {details['msg']}")
    code = "invalid_type" if details["type"].endswith("_type") else "invalid_value"
    accepted = _ACCEPTED.get(details["type"], details["msg"]).format(**details.get("ctx", {}))
    private = isinstance(given, str) and str(location[0]) in _PRIVATE and location[-1] != "role"
    return Fault(param, f"{param} must be {accepted}, not {json_type(given) if private else shown(given)}", code)


_ACCEPTED = {
    "bool_type": "a boolean",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "an array",
    "literal_error": "one of {expected}",
    "model_type": "an object",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_long": "a string of at most {max_length} characters",
    "string_too_short": "a string of at least {min_length} characters",
    "string_type": "a string",
    "too_short": "an array of at least {min_length} elements",
}


def _cross_faults(request: ChatRequest | CompletionRequest) -> list[Fault]:
    """Rules that span fields."""
    faults = []
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"max_tokens ({shown(old)}) and max_completion_tokens ({shown(new)}) differ; give one of them"
        faults.append(Fault("max_tokens", message))
    if request.stream_options is not None and not request.stream:
        faults.append(Fault("stream_options", "stream_options is accepted only with stream: true"))
    if isinstance(request, CompletionRequest) and request.best_of not in (None, request.n or 1):
        message = f"best_of is not supported: got {shown(request.best_of)}, accepted is n ({request.n or 1})"
        faults.append(Fault("best_of", message, "unsupported_parameter"))
    return faults
