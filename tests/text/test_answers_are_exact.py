"""Answers: the exact bytes, the text whatever the cuts, the reasons and counts of their ends."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_text.answer import AnswerWriter
from kvferry_wire.frames import End
from kvferry_wire.leg import ChoiceState
from tests.text.builders import default_tools, events, make_leg, stream_text

EOS = 2


def ids_of(text: str) -> list[int]:
    return default_tools().tokenizer.encode(text, special=False, add_bos=False)


def writer(**changes: Any) -> AnswerWriter:
    return AnswerWriter(make_leg(**changes), default_tools().tokenizer)


def whole_stream(
    answer: AnswerWriter, pushes: list[tuple[int, list[int], str | None, int | None]]
) -> tuple[bytes, End]:
    data = answer.opening()
    for push in pushes:
        data += answer.push(*push).data
    end = answer.end(cached_tokens=0)
    return data + end.data, end


def run(ids: list[int], finish: str | None, stop_token: int | None = None, **changes: Any) -> tuple[Any, End]:
    """One choice, one id per push, not streamed: the body's only choice and the end."""
    answer = writer(stream=False, **changes)
    for position, token_id in enumerate(ids):
        last = position == len(ids) - 1
        written = answer.push(0, [token_id], finish if last else None, stop_token if last else None)
        assert written.data == b"" and written.chars == 0
        if written.stopped:
            break
    end = answer.end(cached_tokens=0)
    body = json.loads(end.data)
    return {**body["choices"][0], "usage": body["usage"]}, end


CHUNK = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"toy-model","choices":[%s]%s}'
TEXT_CHUNK = '{"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"toy-model","choices":[%s]%s}'
USAGE = (
    '"usage":{"prompt_tokens":3,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
)


def test_a_chat_stream_byte_by_byte() -> None:
    """Role chunk, text chunks, finish chunk with an empty delta, usage chunk without choices, [DONE]."""
    hello = ids_of("Hello there")
    assert len(hello) == 2
    answer = writer(include_usage=True)
    data = answer.opening()
    for token_id in hello:
        data += answer.push(0, [token_id], None, None).data
    assert answer.push(0, [EOS], "stop", None).data == b""
    end = answer.end(cached_tokens=2)
    null = ',"usage":null'
    choice = '{"index":0,"delta":{%s},"logprobs":null,"finish_reason":%s}'
    expected = [
        CHUNK % (choice % ('"role":"assistant","content":""', "null"), null),
        CHUNK % (choice % ('"content":"Hello"', "null"), null),
        CHUNK % (choice % ('"content":" there"', "null"), null),
        CHUNK % ('{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}', null),
        CHUNK % ("", "," + USAGE % (3, 6, 2)),
        "[DONE]",
    ]
    assert (data + end.data).decode() == "".join(f"data: {document}\n\n" for document in expected)
    assert (end.finish, end.completion_tokens, end.cached_tokens) == (("stop",), 3, 2)


def test_a_completion_stream_byte_by_byte() -> None:
    """No role chunk, no usage field unless asked for, an empty text in the finish chunk."""
    data, _ = whole_stream(
        writer(kind="completion"), [(0, ids_of("Hello there"), None, None), (0, [5], "length", None)]
    )
    text = default_tools().tokenizer.decode([5])
    choice = '{"index":0,"text":%s,"logprobs":null,"finish_reason":%s}'
    expected = [
        TEXT_CHUNK % (choice % ('"Hello there"', "null"), ""),
        TEXT_CHUNK % (choice % (json.dumps(text), "null"), ""),
        TEXT_CHUNK % ('{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}', ""),
        "[DONE]",
    ]
    assert data.decode() == "".join(f"data: {document}\n\n" for document in expected)


def test_a_whole_chat_answer_byte_by_byte() -> None:
    """One JSON body, with usage."""
    answer = writer(stream=False)
    assert answer.opening() == b""
    assert answer.push(0, [*ids_of("Hello there"), EOS], "stop", None).data == b""
    end = answer.end(cached_tokens=1)
    message = '{"role":"assistant","content":"Hello there","refusal":null}'
    assert end.data.decode() == (
        '{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"toy-model","choices":[{"index":0,'
        f'"message":{message},"logprobs":null,"finish_reason":"stop","stop_reason":null}}],{USAGE % (3, 6, 1)}}}'
    )


def test_a_whole_completion_byte_by_byte() -> None:
    """The text form of the same."""
    answer = writer(kind="completion", stream=False)
    answer.push(0, ids_of("Hello there"), "length", None)
    assert answer.end(cached_tokens=0).data.decode() == (
        '{"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"toy-model","choices":[{"index":0,'
        f'"text":"Hello there","logprobs":null,"finish_reason":"length","stop_reason":null}}],{USAGE % (2, 5, 0)}}}'
    )


@pytest.mark.parametrize(
    ("ids", "finish", "stop_token", "sampling", "text", "reason"),
    [
        ([*ids_of("Hi"), EOS], "stop", None, {}, "Hi", None),
        ([*ids_of("Hi"), 7], "stop", 7, {"stop_token_ids": (7,)}, "Hi", 7),
        ([*ids_of("Hi END now")], None, None, {"stop": ("END",)}, "Hi ", "END"),
        ([EOS], "stop", None, {}, "", None),
    ],
)
def test_the_stop_reason_is_what_the_user_named(
    ids: list[int], finish: str | None, stop_token: int | None, sampling: Any, text: str, reason: Any
) -> None:
    """B039: null for the end of sequence, the string, the integer; none of them in the text."""
    choice, end = run(ids, finish, stop_token, **sampling)
    assert choice["message"]["content"] == text
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    assert end.finish == ("stop",)


def test_ids_are_counted_up_to_the_one_that_ended_the_answer() -> None:
    """The end token counts; ids behind the one that completed a stop string do not, and are not reported as used."""
    assert run([*ids_of("Hello there"), EOS], "stop")[0]["usage"]["completion_tokens"] == 3
    stop_ids = ids_of("Hello there friend of mine")
    answer = writer(stop=("there",))
    answer.opening()
    written = answer.push(0, stop_ids, None, None)
    assert written.stopped and written.ids == tuple(stop_ids[:2]) and written.chars == len("Hello ")
    assert answer.end(0).completion_tokens == 2


def test_a_stop_string_before_the_end_token_wins() -> None:
    """Text decides before what follows it in the same push; the engine has ended by itself and need not be told."""
    answer = writer(stream=False, stop=("there",))
    written = answer.push(0, [*ids_of("Hello there"), EOS], "stop", None)
    assert not written.stopped and len(written.ids) == 2
    assert json.loads(answer.end(0).data)["choices"][0]["stop_reason"] == "there"


def test_ids_under_way_after_a_stop_string_are_dropped() -> None:
    """The engine hears of the stop again; the answer does not change."""
    answer = writer(stop=("there",))
    assert answer.push(0, ids_of("Hello there"), None, None).stopped
    late = answer.push(0, ids_of("friend"), "length", None)
    assert (late.data, late.chars, late.ids, late.stopped) == (b"", 0, (), True)
    assert answer.finished() and answer.end(0).completion_tokens == 2


def test_held_text_is_let_go_at_the_end() -> None:
    """A beginning of a stop string and half a character come out when nothing can follow."""
    answer = writer(stop=("there is",))
    answer.opening()
    assert stream_text(answer.push(0, ids_of("Hello there"), None, None).data) == "Hello "
    last = answer.push(0, [], "length", None)
    assert stream_text(last.data) == "there" and last.chars == 5
    half = ids_of("🐙")[:-1]
    choice, _ = run(half, "length")
    assert choice["message"]["content"] == "\ufffd"


def test_min_tokens_delays_stop_strings() -> None:
    """The text of the first min_tokens ids is never searched; a stop string behind it counts."""
    ids = ids_of("Hello there and there")
    position = ids_of("Hello there")
    choice, _ = run(ids, "length", stop=("there",), min_tokens=len(position))
    assert choice["message"]["content"] == "Hello there and "
    choice, _ = run(ids, "length", stop=("there",), min_tokens=len(ids))
    assert choice["message"]["content"] == "Hello there and there" and choice["finish_reason"] == "length"


def test_ignored_end_tokens_have_no_text_and_end_nothing() -> None:
    """With ignore_eos the end token in the middle is skipped and counted."""
    choice, end = run([*ids_of("Hello"), EOS, *ids_of(" there")], "length", ignore_eos=True)
    assert choice["message"]["content"] == "Hello there" and end.completion_tokens == 3


def test_choices_are_told_apart_and_end_together() -> None:
    """n=3: each chunk bears its index; finish chunks come together at the end; usage is the sum, the prompt once."""
    answer = writer(choices=(ChoiceState(),) * 3, include_usage=True)
    data, end = whole_stream(
        answer,
        [
            (1, ids_of("Hello"), None, None),
            (0, [EOS], "stop", None),
            (2, ids_of("there"), "length", None),
            (1, ids_of(" there"), "length", None),
        ],
    )
    documents = events(data)
    roles = [d["choices"][0]["index"] for d in documents[:3] if d["choices"][0]["delta"].get("role") == "assistant"]
    assert roles == [0, 1, 2]
    assert [stream_text(data, index) for index in range(3)] == ["", "Hello there", "there"]
    finishes = [(d["choices"][0]["index"], d["choices"][0]["finish_reason"]) for d in documents[-5:-2]]
    assert finishes == [(0, "stop"), (1, "length"), (2, "length")]
    assert documents[-2]["usage"]["completion_tokens"] == 4 and documents[-2]["usage"]["prompt_tokens"] == 3
    assert end.finish == ("stop", "length", "length") and documents[-1] == "[DONE]"


def test_usage_comes_only_when_asked_for() -> None:
    """B180: without include_usage no chunk has the field."""
    data, _ = whole_stream(writer(), [(0, [5], "length", None)])
    assert all("usage" not in document for document in events(data)[:-1])


def test_a_finished_answer_refuses_more() -> None:
    """Pushing to a finished choice, pushing after the end, ending early or twice are errors of the caller."""
    answer = writer(choices=(ChoiceState(),) * 2)
    answer.push(0, [5], "length", None)
    assert answer.finished_choices() == {0} and not answer.finished()
    with pytest.raises(ValueError, match="choice 0 has finished"):
        answer.push(0, [6], None, None)
    with pytest.raises(ValueError, match=r"choices \[1\] have not finished"):
        answer.end(0)
    with pytest.raises(ValueError, match="finish is 'eos'"):
        answer.push(1, [6], "eos", None)
    answer.push(1, [6], "length", None)
    answer.end(0)
    for call in (lambda: answer.end(0), lambda: answer.push(1, [6], None, None)):
        with pytest.raises(ValueError, match="has ended"):
            call()


def test_a_recomputed_answer_says_so_before_done() -> None:
    """The reason stands in a comment, which clients skip, and in the end frame."""
    answer = writer()
    answer.push(0, [5], "length", None)
    end = answer.end(0, recomputed="lease_lost")
    assert (
        end.data.endswith(b"\n\n: kvferry recomputed: lease_lost\n\ndata: [DONE]\n\n")
        and end.recomputed == "lease_lost"
    )


def test_text_cannot_break_the_framing() -> None:
    """Line ends of any kind in the text leave every event on one line, for clients that split at any of them."""
    nasty = 'a\n\nb\r\nc"\\ data: [DONE]\u2028d\u2029e\x85f\x0bg\x0ch\x1ci\x7f'
    answer = writer()
    data, _ = whole_stream(answer, [(0, ids_of(nasty), "length", None)])
    assert stream_text(data) == nasty
    lines = [line for line in data.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    body, _ = run(ids_of(nasty), "length")
    assert body["message"]["content"] == nasty


def test_model_names_are_escaped() -> None:
    """A served name with quotes stays one JSON string."""
    leg = make_leg()
    fmt = type(leg.format)(
        **{**{f: getattr(leg.format, f) for f in leg.format.__struct_fields__}, "model": 'a"b\ue000text\u2028'}
    )
    named = type(leg)(**{**{f: getattr(leg, f) for f in leg.__struct_fields__}, "format": fmt})
    answer = AnswerWriter(named, default_tools().tokenizer)
    data, _ = whole_stream(answer, [(0, ids_of("Hi"), "length", None)])
    assert events(data)[1]["model"] == 'a"b\ue000text\u2028' and stream_text(data) == "Hi"


vocabulary = default_tools().bundle.vocab_size
answers = st.lists(st.integers(3, vocabulary - 1) | st.sampled_from(ids_of("🐙你 there")), min_size=1, max_size=25)


@settings(max_examples=200, deadline=None)
@given(answers, st.lists(st.integers(1, 5), max_size=25), st.sampled_from([(), ("there",), ("a", "e t", "你")]),
       st.integers(0, 5))  # fmt: skip
def test_cuts_do_not_change_the_text(ids: list[int], cuts: list[int], stop: Any, min_tokens: int) -> None:
    """However ids are cut into pushes, text, count and reason are those of one id per push."""
    outcomes = []
    for sizes in ([1] * len(ids), cuts, [len(ids)]):
        answer = writer(stop=stop, min_tokens=min_tokens, include_usage=True)
        data, position, used = answer.opening(), 0, 0
        for size in [*sizes, len(ids)]:
            piece = ids[position : position + size]
            position += len(piece)
            done = position == len(ids)
            written = answer.push(0, piece, "length" if done else None, None)
            data, used = data + written.data, used + len(written.ids)
            if done or written.stopped:
                break
        end = answer.end(0)
        data += end.data
        outcomes.append((stream_text(data), end.finish, used, events(data)[-3:]))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][2] == outcomes[0][3][1]["usage"]["completion_tokens"]
