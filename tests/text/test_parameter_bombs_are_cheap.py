"""Every field that a request may have, at every value that ever hurt a server: bounded, or refused by name at once."""

import gc
import json
import time
from typing import Any

import pytest

from kvferry_text.errors import ApiError
from kvferry_text.openai.parameters import UNSUPPORTED, Kind
from kvferry_text.openai.parse import parse_request
from kvferry_text.openai.requests import REQUESTS, field_names
from kvferry_text.prepare import PreparedRequest, prepare
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.text.builders import CONTEXT, MODEL, default_tools, make_body

AT_ONCE_S = 0.5  # of this process's own time, whatever else the machine does
SMALL: dict[str, str] = {
    "0": "0", "-1": "-1", "1": "1", "the cap and one": "9", "2**31": str(2**31), "2**63": str(2**63),
    "-2**63-1": str(-(2**63) - 1), "2**64": str(2**64), "10**9": "1000000000", "10**400": "1" + "0" * 400, "0.5": "0.5",
    "1e308": "1e308", "-1e308": "-1e308", "1e400": "1e400", "-0.0": "-0.0", "5e-324": "5e-324", "NaN": "NaN",
    "Infinity": "Infinity", '"1"': '"1"', '""': '""', "null": "null", "true": "true", "[]": "[]", "{}": "{}",
    "[[]]": "[[]]",
    '"NaN"': '"NaN"', '{"__class__": "x"}': '{"__class__": "x"}', "nul": '"\\u0000"', "surrogate": '"\\ud800"',
}  # fmt: skip
LARGE: dict[str, str] = {
    "a million items": "[" + ",".join("0" * 1_000_000) + "]",
    "a million texts": "[" + ",".join(['"a"'] * 800_000) + "]",
    "a text of 3 MB": '"' + "a" * 3_000_000 + '"',
    "an object of 200000 names": "{" + ",".join(f'"{number}":0' for number in range(200_000)) + "}",
    "lists in lists": "[" * 1000 + "]" * 1000,
    "lists in lists without end": "[" * 1_500_000 + "]" * 1_500_000,
    "objects in objects": '{"a":' * 1000 + "0" + "}" * 1000,
    "a number of a million digits": "9" * 1_000_000,
}
KINDS: tuple[Kind, ...] = ("chat", "completion")


def fields_of(kind: Kind) -> list[str]:
    return sorted({*field_names(REQUESTS[kind]), *UNSUPPORTED[kind], "colour"} - {"model"})


def body_with(kind: Kind, field: str, value: str) -> bytes:
    """A right body with one field at a value that no JSON writer might write."""
    rest = {name: given for name, given in make_body(kind).items() if name != field}
    return (json.dumps(rest)[:-1] + f', "{field}": {value}}}').encode()


def outcome(kind: Kind, body: bytes) -> PreparedRequest | ApiError:
    tools = default_tools()
    try:
        return prepare(kind, body, tools.bundle, tools.tokenizer, tools.template, DEFAULT_LIMITS, (MODEL,), (CONTEXT,))
    except ApiError as error:
        return error


def fault_of(made: PreparedRequest | ApiError, field: str) -> str:
    """What is wrong with an outcome; empty where it is bounded or refused well."""
    if isinstance(made, ApiError):
        refused = 400 <= made.status < 500 and len(made.message) < 3000
        named = made.param is None or field in made.param or made.param in ("max_tokens", "messages", "prompt")
        return "" if refused and named else f"{made.status} {made.param} {made.message[:200]}"
    sampling = made.sampling
    bounded = (
        1 <= made.n <= 8
        and 1 <= sampling.max_tokens <= CONTEXT
        and len(made.prompt_ids) <= CONTEXT
        and 0 <= sampling.temperature <= 2
        and len(sampling.stop_token_ids) <= 64
    )
    return "" if bounded else f"accepted: {made}"


def timed(kind: Kind, body: bytes) -> tuple[PreparedRequest | ApiError, float]:
    """The outcome, and the processor time that it took, without the collector's own pauses."""
    gc.disable()
    try:
        began = time.process_time()
        made = outcome(kind, body)
        return made, time.process_time() - began
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_at_each_small_value(kind: Kind) -> None:
    """Thousands of pairs: a 4xx that names the field, or a request within every bound; never another exception."""
    tried = [(field, name, value) for field in fields_of(kind) for name, value in SMALL.items()]
    assert len(tried) > 1000
    wrong = [
        (field, name, fault)
        for field, name, value in tried
        if (fault := fault_of(outcome(kind, body_with(kind, field, value)), field))
    ]
    assert not wrong


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("kind", KINDS)
def test_each_field_at_each_large_value_costs_a_moment(kind: Kind, name: str) -> None:
    """Megabytes in a field that exists, is not supported, or is none: refused in the time of reading them."""
    for field in ("stop", "n", "logit_bias", "user", "messages" if kind == "chat" else "prompt", "colour"):
        body = body_with(kind, field, LARGE[name])
        made, took = timed(kind, body)
        assert isinstance(made, ApiError), (field, made)
        assert not fault_of(made, field), field
        assert took < AT_ONCE_S or timed(kind, body)[1] < AT_ONCE_S, field


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_of_faults_names_a_few(kind: Kind) -> None:
    """Every field wrong at once, and a hundred thousand that do not exist: one short error."""
    body: dict[str, Any] = {**make_body(kind), **{name: [[]] for name in fields_of(kind)}}
    body |= {f"field{number}": number for number in range(100_000)}
    with pytest.raises(ApiError) as caught:
        parse_request(kind, json.dumps(body).encode(), DEFAULT_LIMITS, (MODEL,))
    assert caught.value.status == 400
    assert len(caught.value.message) < 3000
