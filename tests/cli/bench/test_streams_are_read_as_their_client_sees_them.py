"""Server-sent events: cut anywhere, timed piece by piece, and refused where they are no answer."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_cli.bench.client import AnswerError, EventLines, check_complete, take
from kvferry_cli.bench.load import Request
from kvferry_cli.bench.records import Trace

STREAM = b': comment\ndata: {"a": 1}\n\nevent: x\ndata:{"b": "\xc3\xa4"}\r\n\ndata: [DONE]\n\n'


def make_trace(tokens: int = 2) -> Trace:
    return Trace(request=Request(name="one", kind="stream", prompt_ids=(1, 2, 3), answer_tokens=tokens), sent=0.0)


def event(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}).encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_come_out_whole_however_they_are_cut(places: list[int]) -> None:
    """Comments, other fields and line ends of either kind are no data."""
    lines, ends = EventLines(), sorted({0, *places, len(STREAM)})
    pieces = [STREAM[begin:end] for begin, end in itertools.pairwise(ends)]
    found = [data for piece in pieces for data in lines.feed(piece)]
    assert found == [b'{"a": 1}', '{"b": "ä"}'.encode(), b"[DONE]"]


def test_an_endless_line_is_refused() -> None:
    """Nothing is kept beyond a bound."""
    with pytest.raises(AnswerError, match="an event of more than"):
        list(EventLines().feed(b"data: " + b"x" * 2**21))


def test_text_is_timed_and_what_brings_none_is_not() -> None:
    """The last piece's finish reason and the usage that follows are no tokens."""
    trace = make_trace()
    assert take(trace, event("a"), 1.0) == ""
    assert take(trace, event("b"), 2.5) == ""
    assert take(trace, event("", "length"), 3.0) == "length"
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    assert take(trace, json.dumps({"choices": [], "usage": usage}).encode(), 4.0) == ""
    assert (trace.events, trace.text) == ([1.0, 2.5], "ab")
    assert (trace.completion_tokens, trace.cached_tokens) == (2, 1)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"{", "one: an event that is no JSON object"),
        (b"[1]", "one: an event that is no JSON object"),
        (b'{"error": {"message": "gone"}}', "gone"),
        (b'{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}', "4 prompt tokens of 3"),
    ],
)
def test_what_is_no_answer_ends_the_benchmark(data: bytes, fault: str) -> None:
    """With the request's name and what came."""
    with pytest.raises(AnswerError, match=fault):
        take(make_trace(), data, 1.0)


@pytest.mark.parametrize(
    ("finish", "tokens", "events", "fault"),
    [
        ("length", 1, [1.0], "1 tokens and finish reason length, 2 tokens"),
        ("stop", 2, [1.0], "2 tokens and finish reason stop"),
        ("length", 2, [], "2 tokens without any text"),
    ],
)
def test_an_answer_of_another_length_is_wrong(finish: str, tokens: int, events: list[float], fault: str) -> None:
    """Every answer has exactly the tokens that were asked for."""
    trace = make_trace()
    trace.finish, trace.completion_tokens, trace.events = finish, tokens, events
    with pytest.raises(AnswerError, match=fault):
        check_complete(trace)
