"""A leg that continues an answer: the client's bytes, joined over the legs, are those of one undisturbed answer."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_text.answer import AnswerWriter
from kvferry_wire.leg import ChoiceState
from tests.text.builders import default_tools, events, make_leg, stream_text

EOS = 2


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(default_tools().tokenizer.encode(text, special=False, add_bos=False))


def writer(*choices: ChoiceState, **changes: Any) -> AnswerWriter:
    return AnswerWriter(make_leg(choices=choices, **changes), default_tools().tokenizer)


def test_the_first_token_comes_from_prefill() -> None:
    """Ids picked by prefill, of which the client has nothing, are given out before anything is pushed."""
    answer = writer(ChoiceState(emitted=ids_of("Hello")))
    assert b'"role":"assistant"' in answer.opening()
    [(index, written)] = answer.catch_up()
    assert (index, stream_text(written.data), written.chars, written.stopped) == (0, "Hello", 5, False)
    assert written.ids == ()
    assert answer.catch_up() == [] and answer.opening() == b""
    assert answer.push(0, [EOS], "stop", None).data == b""
    assert answer.end(0).completion_tokens == 2


def test_text_not_asked_for_comes_with_the_next_push() -> None:
    """Role and replayed text are never lost when a caller skips a step."""
    answer = writer(ChoiceState(emitted=ids_of("Hello")))
    written = answer.push(0, ids_of(" there"), None, None)
    assert b'"role":"assistant"' in written.data
    assert (stream_text(written.data), written.chars) == ("Hello there", 11)


def test_a_resumed_stream_repeats_neither_role_nor_text() -> None:
    """With the role sent and the characters sent, only new text comes."""
    answer = writer(ChoiceState(emitted=ids_of("Hello there"), chars_sent=11), role_sent=True)
    assert answer.opening() == b"" and answer.catch_up() == [] and not answer.finished_at_start()
    assert stream_text(answer.push(0, ids_of(" friend"), "length", None).data) == " friend"


def test_text_that_was_sent_in_part_goes_on_behind_that_part() -> None:
    """Ids whose text the client has up to some character give the rest once."""
    answer = writer(ChoiceState(emitted=ids_of("Hello there"), chars_sent=7), role_sent=True)
    [(_, written)] = answer.catch_up()
    assert (stream_text(written.data), written.chars) == ("here", 4)


@pytest.mark.parametrize(
    ("emitted", "sampling", "finish", "reason", "text"),
    [
        ((*ids_of("Hi"), EOS), {}, "stop", None, "Hi"),
        ((EOS,), {}, "stop", None, ""),
        ((*ids_of("Hello there"),), {"max_tokens": 2}, "length", None, "Hello there"),
        ((*ids_of("Hello"), EOS), {"max_tokens": 2}, "stop", None, "Hello"),
        ((*ids_of("Hi"), 9), {"stop_token_ids": (9,)}, "stop", 9, "Hi"),
        ((*ids_of("Hi"), EOS), {"stop_token_ids": (EOS,)}, "stop", None, "Hi"),
        ((*ids_of("Hello there"),), {"stop": ("there",)}, "stop", "there", "Hello "),
        ((*ids_of("Hello there"),), {"stop": ("there",), "max_tokens": 2}, "stop", "there", "Hello "),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_ids_that_end_the_request_need_no_more(
    emitted: tuple[int, ...], sampling: Any, finish: str, reason: Any, text: str, stream: bool
) -> None:
    """End token (also in the last place, B038), length, stop token, stop string: the end alone gives all."""
    answer = writer(ChoiceState(emitted=emitted), stream=stream, include_usage=stream, **sampling)
    assert answer.finished_at_start()
    end = answer.end(0)
    assert (end.finish, end.completion_tokens) == ((finish,), len(emitted))
    if stream:
        documents = events(end.data)
        assert documents[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert documents[-3]["choices"][0]["stop_reason"] == reason and stream_text(end.data) == text
    else:
        choice = json.loads(end.data)["choices"][0]
        assert (choice["message"]["content"], choice["stop_reason"]) == (text, reason)


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_an_end_token_that_does_not_count_ends_nothing(sampling: Any) -> None:
    """Ignored, or below min_tokens."""
    assert not writer(ChoiceState(emitted=(*ids_of("Hi"), EOS)), **sampling).finished_at_start()


def test_one_choice_may_have_ended_before_the_others() -> None:
    """The engine is told of a stop string found while replaying; the other choice goes on."""
    ended = ChoiceState(emitted=ids_of("Hello there"), chars_sent=6)
    answer = writer(ended, ChoiceState(emitted=ids_of("Hello"), chars_sent=5), role_sent=True, stop=("there",))
    assert not answer.finished_at_start()
    [(index, written)] = answer.catch_up()
    assert (index, written.stopped, written.data) == (0, True, b"")
    answer.push(1, ids_of(" there"), None, None)
    assert answer.end(0).finish == ("stop", "stop")


def test_more_characters_than_the_ids_have_is_an_error() -> None:
    """A leg that contradicts itself is refused at once."""
    with pytest.raises(ValueError, match="12 characters are said to be sent"):
        writer(ChoiceState(emitted=ids_of("Hello there"), chars_sent=12))
    with pytest.raises(ValueError, match="outside 0"):
        writer(ChoiceState(emitted=(10**6,)))


def test_whole_answers_hold_the_replayed_text() -> None:
    """An answer that is not streamed has the text of all legs in its body."""
    answer = writer(ChoiceState(emitted=ids_of("Hello there")), stream=False)
    answer.push(0, ids_of(" friend"), "length", None)
    assert json.loads(answer.end(0).data)["choices"][0]["message"]["content"] == "Hello there friend"


vocabulary = default_tools().bundle.vocab_size
some_ids = st.lists(st.integers(3, vocabulary - 1) | st.sampled_from(ids_of("🐙你 there")), min_size=1, max_size=20)


@settings(max_examples=300, deadline=None)
@given(some_ids, st.data(), st.sampled_from([(), ("there",), ("a", "e t", "你")]), st.integers(0, 4),
       st.sampled_from(["chat", "completion"]))  # fmt: skip
def test_legs_joined_equal_one_leg(ids: list[int], data: Any, stop: Any, min_tokens: int, kind: Any) -> None:
    """Broken after any whole frames, any number of times, the text is that of an undisturbed stream, each part once."""
    sampling: Any = {"stop": stop, "min_tokens": min_tokens, "max_tokens": len(ids), "kind": kind}
    undisturbed = writer(ChoiceState(), **sampling)
    expected = undisturbed.opening()
    for position, token_id in enumerate(ids):
        written = undisturbed.push(0, [token_id], "length" if position == len(ids) - 1 else None, None)
        expected += written.data
        if written.stopped:
            break
    expected += undisturbed.end(0).data

    received, state, role_sent = b"", ChoiceState(), False
    for _ in range(20):
        answer = writer(state, role_sent=role_sent, **sampling)
        alive = data.draw(st.integers(0, 6))  # frames that arrive before this leg dies
        frames = [(answer.opening(), (), 0)]
        frames += [(w.data, w.ids, w.chars) for _, w in answer.catch_up()]
        position = len(state.emitted)
        while not answer.finished() and len(frames) <= alive:
            piece = ids[position : position + data.draw(st.integers(1, 4))]
            position += len(piece)
            w = answer.push(0, piece, "length" if position == len(ids) else None, None)
            frames.append((w.data, w.ids, w.chars))
        for payload, used, chars in frames[:alive]:
            received += payload
            role_sent = role_sent or bool(payload)
            state = ChoiceState(emitted=state.emitted + used, chars_sent=state.chars_sent + chars)
        if answer.finished() and len(frames) <= alive:
            received += answer.end(0).data
            break
    else:
        return  # this request never had a leg that lived long enough
    assert stream_text(received) == stream_text(expected)
    assert events(received)[-2:] == events(expected)[-2:]
    roles = [d for d in events(received)[:-1] if d["choices"] and d["choices"][0].get("delta", {}).get("role")]
    assert len(roles) == (kind == "chat")
