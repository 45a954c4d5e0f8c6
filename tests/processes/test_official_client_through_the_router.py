"""openai-python against the router on the toy model: every answer is the oracle's, every error its exception."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from tests.processes.asking import NAME, said
from tests.support.service import Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

QUESTION = "What does a ferry carry from one bank to the other? "
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
RENDERED = f"system: Be brief.\nuser: {QUESTION}\nassistant: "


@pytest.fixture
async def official(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=service.url() + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def test_models(official: openai.AsyncOpenAI) -> None:
    """One model, listed and by name; another is not found."""
    assert [model.id async for model in official.models.list()] == [NAME]
    assert (await official.models.retrieve(NAME)).id == NAME
    with pytest.raises(openai.NotFoundError):
        await official.models.retrieve("gpt-4")


async def test_chat(official: openai.AsyncOpenAI) -> None:
    """The rendered conversation is answered; usage adds up; ids, names and reasons are as a client expects."""
    answer = await official.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=20, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == said(RENDERED, 20)
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == NAME
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(RENDERED), 20)
    assert answer.usage.total_tokens == len(RENDERED) + 20


async def test_an_answer_can_be_sent_back(official: openai.AsyncOpenAI) -> None:
    """The next turn of a conversation, with the last answer's message as the client holds it."""
    answer = await official.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=8, temperature=0)
    spoken = answer.choices[0].message
    more: Any = [*MESSAGES, spoken.model_dump(), {"role": "user", "content": "And back?"}]
    answer = await official.chat.completions.create(model=NAME, messages=more, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == said(RENDERED + f"{spoken.content}\nuser: And back?\nassistant: ", 8)


async def test_streamed_chat(official: openai.AsyncOpenAI) -> None:
    """B180, B186: usage in the last chunk only, which has no choice; the finish comes once, behind all text."""
    stream = await official.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=20,
        temperature=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    *parts, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 40
    assert all(chunk.usage is None for chunk in parts)
    for index in range(2):
        mine = [choice for chunk in parts for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == said(RENDERED, 20)
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["length"]
        assert mine[-1].finish_reason == "length"
        assert not mine[-1].delta.content


async def test_completions(official: openai.AsyncOpenAI) -> None:
    """Text, ids, a wrapped prompt: the same prompt, the same answer; whole and streamed."""
    for prompt in (QUESTION, list(QUESTION.encode()), [QUESTION]):
        answer = await official.completions.create(model=NAME, prompt=prompt, max_tokens=12, temperature=0)
        assert answer.choices[0].text == said(QUESTION, 12)
    stream = await official.completions.create(model=NAME, prompt=QUESTION, max_tokens=12, temperature=0, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == said(QUESTION, 12)


async def test_stop_strings(official: openai.AsyncOpenAI) -> None:
    """The text ends before the string, the reason is stop; whole and streamed, also across tokens."""
    text = said(RENDERED, 40)
    for stop in (text[7:10], [text[20:22], text[9:12]], text[:1]):
        first = min(text.find(each) for each in ([stop] if isinstance(stop, str) else stop))
        for streamed in (False, True):
            request: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 40, "temperature": 0, "stop": stop}
            got, reason = await collect(official, request, streamed)
            assert (got, reason) == (text[:first], "stop"), (stop, streamed)


async def collect(official: openai.AsyncOpenAI, request: dict[str, Any], streamed: bool) -> tuple[str, str | None]:
    if not streamed:
        answer = await official.chat.completions.create(**request)
        return answer.choices[0].message.content or "", answer.choices[0].finish_reason
    text, reason = "", None
    async for chunk in await official.chat.completions.create(**request, stream=True):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


async def test_partial_prefill_says_nothing(official: openai.AsyncOpenAI) -> None:
    """B183: a prompt of many steps and one token: the role, one piece of text, the end; usage counts one token."""
    long: Any = [{"role": "user", "content": QUESTION * 18}]
    stream = await official.chat.completions.create(
        model=NAME, messages=long, max_tokens=1, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [text for chunk in chunks for choice in chunk.choices if (text := choice.delta.content)] == [
        said(f"user: {QUESTION * 18}\nassistant: ", 1)
    ]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 1


async def test_one_line_ends_each_stream(service: Service, client: aiohttp.ClientSession) -> None:
    """B192: chat, completion, two choices and an empty answer end in one ``data: [DONE]`` and a blank line."""
    first = said(QUESTION, 1)
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("chat/completions", {"messages": MESSAGES}),
        ("chat/completions", {"messages": MESSAGES, "n": 2}),
        ("completions", {"prompt": QUESTION}),
        ("completions", {"prompt": QUESTION, "stop": [first]}),
    )
    for route, fields in cases:
        body = {"model": NAME, "max_tokens": 5, "temperature": 0, "stream": True} | fields
        async with client.post(f"{service.url()}/v1/{route}", json=body) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert response.headers["x-kvferry-path"] in ("disaggregated", "aggregated")
            text = await response.text()
        assert text.endswith("\n\ndata: [DONE]\n\n")
        assert text.count("[DONE]") == 1
        for line in filter(None, text.split("\n")):
            assert line.startswith((":", "data: ")), line
            if line.startswith("data: {"):
                json.loads(line.removeprefix("data: "))


async def test_seeds(official: openai.AsyncOpenAI) -> None:
    """B044: one seed gives one answer, that of the oracle; none gives other answers each time."""

    async def text(**fields: Any) -> str:
        request: dict[str, Any] = {"model": NAME, "prompt": QUESTION, "max_tokens": 12, "temperature": 1.2} | fields
        answer: openai.types.Completion = await official.completions.create(**request)
        return answer.choices[0].text

    assert {await text(seed=7), await text(seed=7)} == {said(QUESTION, 12, seed=7, temperature=1.2)}
    assert await text(seed=-1) == await text(seed=-1)
    assert len({await text() for _ in range(3)}) > 1
    choices = (await official.completions.create(model=NAME, prompt=QUESTION, max_tokens=12, n=3, seed=7)).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert [choice.text for choice in choices] == [
        said(QUESTION, 12, seed=7 + index, temperature=1.0) for index in range(3)
    ]


async def test_samplings_do_not_mix(official: openai.AsyncOpenAI) -> None:
    """B045: greedy in three ways and two seeded ones, at once and alone."""
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9, "extra_body": {"top_k": 1}},
        {"temperature": 0.9, "top_p": 1e-6},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.5, "seed": 2},
    )

    async def text(fields: dict[str, Any]) -> str:
        request: dict[str, Any] = {"model": NAME, "prompt": QUESTION, "max_tokens": 16} | fields
        answer: openai.types.Completion = await official.completions.create(**request)
        return answer.choices[0].text

    together = await asyncio.gather(*(text(way) for way in ways))
    alone = [await text(way) for way in ways]
    assert together == alone
    assert set(together[:3]) == {said(QUESTION, 16)}
    assert together[3:] == [
        said(QUESTION, 16, seed=1, temperature=1.0),
        said(QUESTION, 16, seed=2, temperature=1.5),
    ]


async def test_errors_are_the_clients_exceptions(service: Service, official: openai.AsyncOpenAI) -> None:
    """Each status is the exception that a program catches, with param, code and the request's id."""

    async def fails(kind: type[openai.APIStatusError], **fields: Any) -> openai.APIStatusError:
        with pytest.raises(kind) as caught:
            await official.chat.completions.create(**({"model": NAME, "messages": MESSAGES} | fields))
        return caught.value

    error = await fails(openai.BadRequestError, temperature=9, extra_headers={"x-request-id": "mine-1"})
    assert error.param == "temperature"
    assert error.request_id == "mine-1"
    error = await fails(openai.NotFoundError, model="gpt-4")
    assert error.code == "model_not_found"
    error = await fails(openai.BadRequestError, messages=[{"role": "user", "content": "x" * 4000}])
    assert error.code == "context_length_exceeded"
    assert "2048" in error.message  # B062: the context, not a number that the user never sent
    error = await fails(openai.BadRequestError, tools=[{"type": "function", "function": {"name": "f"}}])
    assert error.param == "tools"
    with pytest.raises(openai.BadRequestError):
        await official.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, n=99)
    async with openai.AsyncOpenAI(base_url=service.url("decode-0") + "/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_same_request_id_twice_is_two_requests(official: openai.AsyncOpenAI) -> None:
    """B010: two overlapping requests of one x-request-id are answered each, and get that id back."""

    async def one(number: int) -> None:
        prompt = f"{number}: {QUESTION}"
        raw = await official.completions.with_raw_response.create(
            model=NAME, prompt=prompt, max_tokens=60, temperature=0, extra_headers={"x-request-id": "twice"}
        )
        assert raw.headers["x-request-id"] == "twice"
        assert raw.parse().choices[0].text == said(prompt, 60)

    await asyncio.gather(one(1), one(2), one(2))


async def test_cached_prompts_say_so(official: openai.AsyncOpenAI) -> None:
    """B019: the second time most of the prompt is cached, and the answer is the same."""
    prompt = "Asked by no other test: " + QUESTION * 4

    async def ask() -> tuple[str, int]:
        answer = await official.completions.create(model=NAME, prompt=prompt, max_tokens=20, temperature=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    assert await ask() == (said(prompt, 20), 0)
    for _ in range(3):
        text, cached = await ask()
        assert text == said(prompt, 20)
        assert len(prompt) - 32 <= cached < len(prompt)
