"""Bodies that are no request at all: 4xx with a readable reason, quickly, never an exception of another kind."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_text.errors import ApiError
from kvferry_wire.limits import Limits
from tests.text.builders import MODEL, make_body, prepare_body, prepare_bytes


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"null",
        b"5",
        b'"text"',
        b"[]",
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b'{"temperature": 1e999}',
        b"{'model': 'x'}",
        b'{"model": "x",}',
        b'{"model": "x"} trailing',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\x00}\x00",
        b'{"model": "\xff"}',
        b'{"model": "\xf0\x9f\x98"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\ude00\\ud83d"}',
        b'{"model": "\\ud83d"}',
        b'{"model": "\\u12"}',
        b"[" * 1_000_000,
        b'{"a":' * 500_000,
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\x00" * 100,
    ],
)
def test_what_is_no_json_object_is_400(body: bytes) -> None:
    """Wrong JSON, half characters, lone surrogates and nesting bombs give 400 `invalid_json`."""
    with pytest.raises(ApiError) as caught:
        prepare_bytes("chat", body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert len(caught.value.message) < 200


def test_nested_values_below_the_reader_s_depth_are_refused_too() -> None:
    """A deeply nested value in a field that passes the JSON reader is a fault of that field."""
    nested: object = "x"
    for _ in range(300):
        nested = [nested]
    for field in ("stop", "tools", "metadata", "wat", "messages"):
        with pytest.raises(ApiError) as caught:
            prepare_body("chat", **{field: nested})
        assert caught.value.status == 400


def test_a_body_over_the_cap_is_413() -> None:
    """More bytes than the cap are refused before they are read as JSON."""
    with pytest.raises(ApiError) as caught:
        prepare_bytes("chat", b" " * 101, limits=Limits(body_bytes=100))
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")
    assert "100" in caught.value.message


@pytest.mark.parametrize("character", ["a", " ", "你"])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_five_million_characters_are_refused_before_tokenizing(kind: str, character: str) -> None:
    """The cap on characters holds also where the cap on bytes lets a text pass, and costs next to nothing."""
    text = character * 5_000_000
    fields = {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
    body = json.dumps({"model": MODEL, **fields}, ensure_ascii=False).encode()
    started = time.process_time()
    with pytest.raises(ApiError) as caught:
        prepare_bytes(kind, body, limits=Limits(body_bytes=20_000_000))  # type: ignore[arg-type]
    assert time.process_time() - started < 0.5
    assert (caught.value.status, caught.value.code) == (400, "string_above_max_length")
    assert "1000000" in caught.value.message


def test_the_cap_counts_all_messages_together() -> None:
    """Many small messages are one text."""
    messages = [{"role": "user", "content": "a" * 100}] * 20
    with pytest.raises(ApiError) as caught:
        prepare_body("chat", None, Limits(text_chars=1999), messages=messages)
    assert caught.value.code == "string_above_max_length"


def test_the_last_of_two_equal_names_counts() -> None:
    """A doubled name is read as most JSON readers read it."""
    body = json.dumps(make_body("chat")).encode()[:-1] + b', "max_tokens": 5, "max_tokens": 7}'
    assert prepare_bytes("chat", body).sampling.max_tokens == 7


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
fields = st.sampled_from(
    ["messages", "prompt", "stop", "n", "seed", "temperature", "stream", "stream_options", "tools", "max_tokens",
     "logit_bias", "best_of", "response_format", "top_p", "stop_token_ids", "min_tokens", "user", "metadata", "wat"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["chat", "completion"]), changes=st.dictionaries(fields, json_values, min_size=1, max_size=4)
)
def test_any_json_is_served_or_refused_in_shape(kind: str, changes: dict[str, object]) -> None:
    """Whatever the fields hold, the outcome is a prepared request or a 4xx that names a field."""
    try:
        prepare_body(kind, **changes)  # type: ignore[arg-type]
    except ApiError as error:
        assert error.status == 400
        assert error.param is not None or error.code == "invalid_json"
        assert set(json.loads(error.body())["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_in_shape(body: bytes) -> None:
    """Random bytes never cause anything but a 400."""
    with pytest.raises(ApiError) as caught:
        prepare_bytes("completion", body)
    assert caught.value.status == 400
