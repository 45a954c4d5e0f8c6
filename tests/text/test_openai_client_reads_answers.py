"""The official client's own types and stream reader take our answers."""

import json
from typing import Any

import httpx2
import pytest
from openai import APIError, OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvferry_text import errors, sse
from kvferry_text.answer import AnswerWriter
from kvferry_text.openai.models import find_model, model_list
from kvferry_wire.leg import ChoiceState
from tests.text.builders import MODEL, default_tools, events, make_leg

TEXT = "Hello 🎉 你好\n\nthere\u2028!"


def answer(**changes: Any) -> bytes:
    leg = make_leg(choices=(ChoiceState(),) * 2, include_usage=True, **changes)
    writer = AnswerWriter(leg, default_tools().tokenizer)
    ids = default_tools().tokenizer.encode(TEXT, special=False, add_bos=False)
    data = writer.opening()
    for choice in (0, 1):
        for token_id in ids:
            data += writer.push(choice, [token_id], None, None).data
        data += writer.push(choice, [2], "stop", None).data
    return data + writer.end(1).data


def client(data: bytes, *, stream: bool, one_byte: bool = False) -> OpenAI:
    """A client whose server answers with these bytes."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        content = (bytes([byte]) for byte in data) if one_byte else data
        media = "text/event-stream" if stream else "application/json"
        return httpx2.Response(200, headers={"content-type": media}, content=content)

    http = httpx2.Client(transport=httpx2.MockTransport(respond))
    return OpenAI(base_url="http://127.0.0.1/v1", api_key="k", http_client=http, max_retries=0)


def test_chunks_and_bodies_are_of_the_client_s_types() -> None:
    """Strict validation of every chunk and body."""
    for document in events(answer())[:-1]:
        ChatCompletionChunk.model_validate(document, strict=True)
    for document in events(answer(kind="completion"))[:-1]:
        Completion.model_validate({"choices": [], **_finished(document)}, strict=True)
    ChatCompletion.model_validate(json.loads(answer(stream=False)), strict=True)
    Completion.model_validate(json.loads(answer(kind="completion", stream=False)), strict=True)


def _finished(document: Any) -> Any:
    # The client's Completion has no null finish_reason, though OpenAI's own chunks do.
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in document["choices"]]
    return {**document, "choices": choices}


@pytest.mark.parametrize("one_byte", [False, True])
def test_the_client_joins_a_stream(one_byte: bool) -> None:
    """B194: also when each byte comes alone."""
    messages: Any = [{"role": "user", "content": "x"}]
    with client(answer(), stream=True, one_byte=one_byte) as openai:
        chunks = list(openai.chat.completions.create(model=MODEL, messages=messages, stream=True))
        for index in (0, 1):
            deltas = [c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index]
            assert "".join(deltas) == TEXT
        assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens_details is not None
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 1
        assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_client_reads_a_whole_answer() -> None:
    """Content, finish reason and usage."""
    messages: Any = [{"role": "user", "content": "x"}]
    with client(answer(stream=False), stream=False) as openai:
        completion = openai.chat.completions.create(model=MODEL, messages=messages)
        assert [choice.message.content for choice in completion.choices] == [TEXT, TEXT]
        assert completion.choices[0].finish_reason == "stop"


def test_the_client_raises_an_error_in_a_stream() -> None:
    """An error event ends the client's iteration with an exception, after the text that was good."""
    opening = AnswerWriter(make_leg(), default_tools().tokenizer).opening()
    data = opening + sse.error_event(errors.internal("the decode pod was lost"))
    messages: Any = [{"role": "user", "content": "x"}]
    with client(data, stream=True) as openai:
        stream = openai.chat.completions.create(model=MODEL, messages=messages, stream=True)
        assert next(stream).choices[0].delta.role == "assistant"
        with pytest.raises(APIError, match="the decode pod was lost"):
            next(stream)


def test_models_are_listed_in_the_client_s_type() -> None:
    """Each card is the client's Model; a name that is not served is 404."""
    listed = model_list(["a", "b"], created=1, max_model_len=512)
    cards = json.loads(listed.model_dump_json())
    assert cards["object"] == "list" and [Model.model_validate(card).id for card in cards["data"]] == ["a", "b"]
    assert find_model(listed, "b").max_model_len == 512
    with pytest.raises(errors.ApiError) as caught:
        find_model(listed, "c")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
