"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}``."""

import json
from collections.abc import Callable
from typing import Protocol

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    """The ``type`` that goes with a status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")


def error_body(
    status: int, message: str, *, kind: str = "", param: str | None = None, code: str | None = None
) -> bytes:
    """The JSON body of an error; ``kind`` is its ``type``, by default the status's."""
    error = {"message": message, "type": kind or error_type(status), "param": param, "code": code}
    return json.dumps({"error": error}).encode()


class HttpError(Exception):
    """Ends a request with this answer. The message goes to the client as it is: no path, no address, no prompt."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        return error_body(self.status, self.message, kind=self.kind, param=self.param, code=self.code)


class Answer(Protocol):
    """What an exception of a layer that does not know this one must say of itself to become an answer."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None
    retry_after: int | None


def translator(kind: type[Answer]) -> Callable[[Exception], HttpError | None]:
    """Turns exceptions of a kind into what ``build_app`` answers with, and no others."""

    def translate(error: Exception) -> HttpError | None:
        if not isinstance(error, kind):
            return None
        return HttpError(
            error.status,
            error.message,
            kind=error.type,
            param=error.param,
            code=error.code,
            retry_after_s=error.retry_after,
        )

    return translate
