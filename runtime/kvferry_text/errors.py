"""The errors a client may see, in OpenAI's shape, and the one mapping from a leg's failure to them.

A message is fit for the client: it holds no path, no address and no prompt text. A bad value is echoed only if it is a
short scalar (see ``shown``).
"""

from collections.abc import Sequence

import msgspec

from kvferry_wire.frames import Fail, FailKind
from kvferry_wire.limits import DEFAULT_LIMITS, Limits

ECHO_CHARS = 40
LISTED_FAULTS = 8
MESSAGE_CHARS = 2000

_INVALID_REQUEST = "invalid_request_error"


class ApiError(Exception):
    """What a request is answered with when it is not answered.

    Attributes:
        status: HTTP status.
        type: OpenAI's error class, for example ``invalid_request_error``.
        param: the request field at fault, for example ``messages[0].content``; ``None`` where no field is.
        code: a stable word for programs, for example ``context_length_exceeded``.
        retry_after: seconds for a ``Retry-After`` header; ``None`` where a retry is of no use or any time will do.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON body: ``{"error": {"message", "type", "param", "code"}}``."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """Headers that go with the status besides the content type."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def __repr__(self) -> str:
        return f"ApiError({self.status}, code={self.code!r}, param={self.param!r})"


class Fault(msgspec.Struct, frozen=True):
    """One thing wrong with a request. ``message`` is a clause that names the field itself."""

    param: str | None
    message: str
    code: str = "invalid_value"


def shown(value: object) -> str:
    """A bad value as a message may show it: scalars capped at ``ECHO_CHARS``, anything else as its JSON type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # Python refuses to print integers of thousands of digits.
        return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        cut = value if len(value) <= ECHO_CHARS else value[:ECHO_CHARS] + "..."
        return msgspec.json.encode(cut).decode()
    return json_type(value)


def json_type(value: object) -> str:
    """The JSON type of a decoded value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list | tuple) else "an object"


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, message, type=_INVALID_REQUEST, param=param, code=code)


def bad_fields(faults: Sequence[Fault]) -> ApiError:
    """400 for one or more faults: ``param`` and ``code`` are those of the first, the message lists all (capped)."""
    listed = [fault.message for fault in faults[:LISTED_FAULTS]]
    if len(faults) > LISTED_FAULTS:
        listed.append(f"and {len(faults) - LISTED_FAULTS} more")
    message = "; ".join(listed)
    if len(message) > MESSAGE_CHARS:
        message = message[:MESSAGE_CHARS] + "..."
    return bad_request(message, param=faults[0].param, code=faults[0].code)


def unauthorized() -> ApiError:
    """401: no API key, or one that is not known; which of the two is not told."""
    message = "a valid API key is needed: send it as 'Authorization: Bearer KEY'"
    return ApiError(401, message, type="authentication_error", code="invalid_api_key")


def model_not_found(name: str) -> ApiError:
    """404: a model name that this service does not serve."""
    message = f"the model {shown(name)} does not exist; GET /v1/models lists what is served"
    return ApiError(404, message, type=_INVALID_REQUEST, param="model", code="model_not_found")


def not_found(method: str, path: str) -> ApiError:
    """404: no such endpoint."""
    message = f"no endpoint {shown(f'{method} {path}')}"
    return ApiError(404, message, type=_INVALID_REQUEST, code="unknown_url")


def method_not_allowed(method: str, allowed: Sequence[str]) -> ApiError:
    """405: the endpoint exists, but not for this method."""
    message = f"method {shown(method)} is not allowed here; allowed: {', '.join(allowed)}"
    return ApiError(405, message, type=_INVALID_REQUEST, code="method_not_allowed")


def body_too_large(limit: int) -> ApiError:
    """413: more bytes than ``Limits.body_bytes``."""
    message = f"the request body is larger than {limit} bytes"
    return ApiError(413, message, type=_INVALID_REQUEST, code="request_too_large")


def context_length_exceeded(message: str, *, param: str) -> ApiError:
    """400: prompt, or prompt and answer, are longer than the model's context."""
    return bad_request(message, param=param, code="context_length_exceeded")


def over_capacity(message: str, *, retry_after: int) -> ApiError:
    """429: a queue or a quota is full; the same request may succeed later."""
    return ApiError(429, message, type="rate_limit_error", code="over_capacity", retry_after=retry_after)


def unavailable(message: str, *, retry_after: int) -> ApiError:
    """503: nothing can serve the request now."""
    return ApiError(503, message, type="server_error", code="unavailable", retry_after=retry_after)


def deadline_exceeded(message: str) -> ApiError:
    """504: the request's time was up before its answer was complete."""
    return ApiError(504, message, type="server_error", code="deadline_exceeded")


def cancelled(message: str) -> ApiError:
    """499: aborted by name; a client that left never sees it."""
    return ApiError(499, message, type="server_error", code="cancelled")


def internal(message: str = "the server failed to answer the request") -> ApiError:
    """500: a fault of ours."""
    return ApiError(500, message, type="server_error", code="internal_error")


def from_fail(fail: Fail, limits: Limits = DEFAULT_LIMITS) -> ApiError:
    """The client's error for a leg that ended with ``Fail`` and is not tried again."""
    message = fail.message or _DEFAULT_MESSAGE[fail.kind]
    match fail.kind:
        case "invalid":
            return bad_request(message, param=fail.param)
        case "busy":
            return over_capacity(message, retry_after=limits.retry_after_s)
        case "draining" | "transfer":
            return unavailable(message, retry_after=limits.retry_after_s)
        case "deadline":
            return deadline_exceeded(message)
        case "cancelled":
            return cancelled(message)
        case "internal":
            return internal(message)


_DEFAULT_MESSAGE: dict[FailKind, str] = {
    "invalid": "the request cannot be served as it is",
    "busy": "the service is at capacity",
    "draining": "the service takes nothing new at the moment",
    "deadline": "the request's time is up",
    "cancelled": "the request was cancelled",
    "internal": "the server failed to answer the request",
    "transfer": "the prompt's KV could not be ferried",
}
