"""Errors: one shape, one status per kind, and nothing in them that a client should not see."""

import json

import pytest

from kvferry_text import errors, sse
from kvferry_text.errors import ApiError, Fault
from kvferry_wire.frames import Fail, FailKind
from kvferry_wire.limits import Limits


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.bad_request("m", param="p"), 400, "invalid_value"),
        (errors.context_length_exceeded("m", param="p"), 400, "context_length_exceeded"),
        (errors.unauthorized(), 401, "invalid_api_key"),
        (errors.model_not_found("x"), 404, "model_not_found"),
        (errors.not_found("GET", "/x"), 404, "unknown_url"),
        (errors.method_not_allowed("GET", ["POST"]), 405, "method_not_allowed"),
        (errors.body_too_large(5), 413, "request_too_large"),
        (errors.over_capacity("m", retry_after=1), 429, "over_capacity"),
        (errors.cancelled("m"), 499, "cancelled"),
        (errors.internal(), 500, "internal_error"),
        (errors.unavailable("m", retry_after=2), 503, "unavailable"),
        (errors.deadline_exceeded("m"), 504, "deadline_exceeded"),
    ],
)
def test_every_kind_has_its_status_and_the_shape(error: ApiError, status: int, code: str) -> None:
    """Body: an object `error` with message, type, param and code; Retry-After exactly with 429 and 503."""
    body = json.loads(error.body())
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert (error.status, body["error"]["code"]) == (status, code)
    assert ("Retry-After" in error.headers()) == (status in (429, 503))
    assert str(error) == error.message


FAILURES: dict[FailKind, int] = {
    "invalid": 400,
    "busy": 429,
    "draining": 503,
    "deadline": 504,
    "cancelled": 499,
    "internal": 500,
}


@pytest.mark.parametrize(("kind", "status"), FAILURES.items())
def test_each_failure_of_a_leg_has_one_error(kind: FailKind, status: int) -> None:
    """The frame's message and param reach the client; Retry-After comes from the limits; no message is replaced."""
    error = errors.from_fail(Fail(kind=kind, message="why", param="prompt"), Limits(retry_after_s=7))
    assert (error.status, error.message) == (status, "why")
    assert error.param == ("prompt" if kind == "invalid" else None)
    assert error.headers().get("Retry-After") == ("7" if status in (429, 503) else None)
    assert errors.from_fail(Fail(kind=kind, message="")).message


def test_a_value_is_echoed_only_as_a_short_scalar() -> None:
    """Long strings are cut, huge integers and containers are described."""
    assert errors.shown("abc") == '"abc"'
    assert errors.shown("a" * 100) == '"' + "a" * 40 + '..."'
    assert errors.shown("\n\u2028") in ('"\\n\u2028"', '"\\n\\u2028"')
    assert errors.shown(True) == "true" and errors.shown(None) == "null" and errors.shown(1.5) == "1.5"
    assert errors.shown(10**5000) == "an integer of 16610 bits"
    assert errors.shown([1, 2]) == "an array" and errors.shown({}) == "an object"


def test_faults_are_listed_with_a_cap() -> None:
    """The first fault gives param and code; the message lists some and counts the rest."""
    error = errors.bad_fields([Fault(f"p{index}", f"p{index} is wrong", f"c{index}") for index in range(20)])
    assert (error.param, error.code) == ("p0", "c0")
    assert error.message.endswith("p7 is wrong; and 12 more")
    assert len(errors.bad_fields([Fault("p", "x" * 10_000)]).message) < 2010


def test_an_error_in_a_stream_is_its_last_event() -> None:
    """The event holds the error body and is not followed by [DONE]."""
    data = sse.error_event(errors.internal("broken"))
    assert data.startswith(b'data: {"error":') and data.endswith(b"}\n\n") and b"DONE" not in data
