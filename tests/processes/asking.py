"""Requests to the toy model, what the oracle says of each, and the one judgement that every answer must pass."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import aiohttp

from kvferry_runtime.model.toy_oracle import CANDIDATE_SCORES, ToyOracle
from kvferry_runtime.model.toy_spec import ToySpec
from tests.runtime.exec.sampler_twin import noise

SPEC = ToySpec()  # its speed aside, the model that the service runs
NAME = "toy"
CLEAR_LEAD = 1e-3  # of a sampled pick over the next one; the engine computes scores and noise in float32
ERRORS = {429, 500, 502, 503, 504}  # what a fault of ours may be answered with


class UnclearError(Exception):
    """Two candidates are as good as equal: this seed proves nothing."""


def said(prompt: str, tokens: int, *, seed: int = 0, temperature: float = 0.0, spec: ToySpec = SPEC) -> str:
    """What the toy model answers to this many tokens; one character each.

    Args:
        seed: of the choice, its number included.

    Raises:
        UnclearError: a sampled pick is too close to call.
    """
    oracle = ToyOracle(spec)
    for byte in prompt.encode():
        oracle.feed(byte)
    answer: list[int] = []
    for _ in range(tokens):
        candidates = oracle.candidates()
        token = candidates[0] if temperature == 0 else _drawn(candidates, seed, oracle.position, temperature)
        answer.append(token)
        oracle.feed(token)
    return bytes(answer).decode("ascii")


def _drawn(candidates: Sequence[int], seed: int, position: int, temperature: float) -> int:
    """Of the four: all other tokens are 105 and more behind, which no noise makes up for."""
    scored = sorted(
        (
            (score / temperature + noise(seed, position, token), token)
            for token, score in zip(candidates, CANDIDATE_SCORES, strict=True)
        ),
        reverse=True,
    )
    if scored[0][0] - scored[1][0] < CLEAR_LEAD:
        raise UnclearError
    return scored[0][1]


@dataclass(frozen=True)
class Ask:
    """One request to ``/v1/completions``."""

    prompt: str
    max_tokens: int = 24
    n: int = 1
    stream: bool = True
    temperature: float = 0.0
    seed: int = 0
    stop: str = ""
    spec: ToySpec = SPEC
    model: str = NAME

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "prompt": self.prompt, "max_tokens": self.max_tokens, "n": self.n}
        body |= {"temperature": self.temperature, "seed": self.seed, "stream": self.stream}
        if self.stop:
            body["stop"] = [self.stop]
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body

    @cached_property
    def expected(self) -> list[tuple[str, str]]:
        """Text and finish reason of each choice."""
        choices = []
        for choice in range(self.n):
            seed = self.seed + choice
            text = said(self.prompt, self.max_tokens, seed=seed, temperature=self.temperature, spec=self.spec)
            cut = text.find(self.stop) if self.stop else -1
            choices.append((text, "length") if cut < 0 else (text[:cut], "stop"))
        return choices


def make_ask(source: random.Random, mark: str, spec: ToySpec = SPEC) -> Ask:
    """Anything: length, stream or whole, choices, greedy or seeded sampling, a stop string of the answer's own."""
    shared = source.choice(["", "A beginning that several prompts share, some blocks long. " * 2])
    words = "".join(source.choice("abcdefghij klmno") for _ in range(source.randrange(1, 300)))
    while True:
        ask = Ask(
            prompt=f"{shared}{mark} {words}",
            max_tokens=source.choice([1, 5, 20, 40, 80]),
            n=source.choice([1, 1, 1, 2, 3]),
            stream=source.random() < 0.6,
            temperature=source.choice([0.0, 0.0, 0.7, 1.3]),
            seed=source.randrange(2**62),
            spec=spec,
        )
        try:
            text = ask.expected[0][0]
        except UnclearError:
            continue  # a pick too close to call: another one is drawn
        if source.random() < 0.2 and len(text) > 4:
            at = source.randrange(1, len(text) - 2)
            ask = Ask(**{**{name: getattr(ask, name) for name in ask.__dataclass_fields__}, "stop": text[at : at + 2]})
        return ask


@dataclass
class Answer:
    """What a client got."""

    status: int
    path: str = ""
    texts: list[str] = field(default_factory=list)
    finish: list[str | None] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False  # [DONE], or the whole body of one that is not streamed
    broken: bool = False  # the connection ended before the answer did
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.done and self.error is None


async def ask_for(session: aiohttp.ClientSession, url: str, ask: Ask) -> Answer:
    """Send a request and read its answer to the end, however it ends. Raises only when no answer began."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with session.post(url + "/v1/completions", json=ask.body()) as response:
        answer = Answer(response.status, response.headers.get("x-kvferry-path", ""))
        answer.texts, answer.finish = [""] * ask.n, [None] * ask.n
        body = b""
        try:
            async for part in response.content.iter_any():
                body += part
        except aiohttp.ClientPayloadError:
            answer.broken = True
    answer.seconds = loop.time() - begun
    if response.status != 200 or not ask.stream:
        if not answer.broken:
            read_whole(answer, json.loads(body))
    else:
        read_stream(answer, body)
    return answer


def read_whole(answer: Answer, document: dict[str, Any]) -> None:
    """Take the body of an answer in that is not streamed, or of one that failed before it began."""
    answer.error = document.get("error")
    answer.done = answer.error is None
    answer.usage = document.get("usage")
    for choice in document.get("choices", ()):
        answer.texts[choice["index"]] = choice["text"]
        answer.finish[choice["index"]] = choice["finish_reason"]


def read_stream(answer: Answer, body: bytes) -> None:
    """Take a stream's events in. A cut event counts for nothing."""
    *events, rest = body.decode().split("\n\n")
    assert answer.broken or not rest, f"the stream ends within an event: {rest!r}"
    for event in events:
        assert not answer.done, f"after [DONE]: {event!r}"
        assert answer.error is None, f"after the error event: {event!r}"
        if event == "data: [DONE]":
            answer.done = True
        elif event.startswith("data: "):
            _take(answer, json.loads(event.removeprefix("data: ")))
        else:
            assert event.startswith(":"), f"neither an event nor a comment: {event!r}"


def _take(answer: Answer, document: dict[str, Any]) -> None:
    answer.error = document.get("error")
    answer.usage = document.get("usage") or answer.usage
    for choice in document.get("choices", ()):
        index = choice["index"]
        assert answer.finish[index] is None, f"choice {index} goes on after its end"
        answer.texts[index] += choice["text"]
        answer.finish[index] = choice["finish_reason"]


def judge(ask: Ask, answer: Answer, *, router_died: bool = False) -> None:
    """The promise: the oracle's answer, or an exact prefix of it and an explicit error. Never a clean end on a cut.

    Args:
        router_died: the router itself was killed, so that nobody was left to say why the connection ended.
    """
    told = f"{ask}\n{answer}"
    for (text, finish), got, reason in zip(ask.expected, answer.texts, answer.finish, strict=True):
        assert text.startswith(got), f"not a prefix of {text!r}: {got!r}\n{told}"
        assert reason in (None, finish), told
        assert reason is None or got == text, f"a clean end on a cut answer\n{told}"
    if answer.ok:
        assert answer.finish == [finish for _, finish in ask.expected], told
    judge_end(ask, answer, router_died=router_died)
    if answer.ok:
        assert answer.usage is not None
        _judge_usage(ask, answer.usage)


def judge_end(ask: Ask, answer: Answer, *, router_died: bool = False) -> None:
    """How an answer ended, whatever its text: whole, or in an explicit error and a cut connection.

    Args:
        router_died: as of ``judge``.
    """
    told = f"{ask}\n{answer}"
    if answer.ok:
        assert None not in answer.finish, told
        assert not answer.broken, told
        assert answer.usage is not None, told
    elif answer.error is None:
        assert router_died, f"neither a right end nor an error\n{told}"
        assert answer.broken, told
    else:
        assert set(answer.error) == {"message", "type", "param", "code"}, told
        assert answer.error["message"], told
        assert not answer.done, told
        if answer.status == 200:
            assert answer.broken, f"HTTP says that the answer is whole\n{told}"
        else:
            assert answer.status in ERRORS, told
            assert not any(answer.texts), told


def _judge_usage(ask: Ask, usage: dict[str, Any]) -> None:
    assert usage["prompt_tokens"] == len(ask.prompt.encode())
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    if not ask.stop:
        assert usage["completion_tokens"] == ask.n * ask.max_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
