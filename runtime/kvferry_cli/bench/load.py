"""The load of a benchmark: which requests, of what length, in which order. Pure; the same seed gives the same requests.

Some streams run all the time, each slot asking again as soon as its answer ends, while long prompts arrive one at a
time. No two requests of a run begin alike, so that nothing is found in a prefix cache.
"""

import random
from collections.abc import Sequence
from typing import Literal

import msgspec

Kind = Literal["prompt", "stream"]

WARM_UP = -1  # the number of the round that is not measured

_TEXT = (
    "the of and to in is was for it with as his on be at by had not are but from or have an they which one you were all"
    " her she there would their we him been has when who will no more if out so up said what its about than into them"
    " can only other time new some could these two may first then do any like my now over such our man me even most"
    " made after also did many off before must well back through years much where your way down should because long"
    " each just state those people too little world own good men work life between under water harbour ferry island"
    " engine river morning captain cargo north window paper letter summer garden story train market silver"
)
WORDS = tuple(_TEXT.split())


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How much is asked; lengths in tokens."""

    streams: int
    stream_prompt_tokens: int
    stream_tokens: int  # of each answer of a running stream
    prompts: int  # long ones, in each round
    prompt_tokens: int
    answer_tokens: int  # of a long prompt's answer
    pause_s: float  # the longest pause between a long prompt's answer and the next prompt
    rounds: int  # measured ones, of each side
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and answer."""
        return max(self.stream_prompt_tokens + self.stream_tokens, self.prompt_tokens + self.answer_tokens)

    @property
    def at_once(self) -> int:
        """Tokens of all sequences that run at the same time."""
        streams = self.streams * (self.stream_prompt_tokens + self.stream_tokens)
        return streams + self.prompt_tokens + self.answer_tokens


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the load; greedy, and its answer has exactly ``answer_tokens``."""

    name: str  # unique in a run, the same for both sides
    kind: Kind
    prompt_ids: tuple[int, ...]
    answer_tokens: int


class Schedule:
    """All requests of a run.

    Args:
        words: token ids of each word of the prompts.
    """

    def __init__(self, spec: LoadSpec, words: Sequence[Sequence[int]]) -> None:
        if not words or not all(words):
            raise ValueError("words: each needs at least one token")
        self.spec = spec
        self._words = words

    def prompt(self, round_number: int, index: int) -> Request:
        """Long prompt ``index`` of a round."""
        name = f"round {round_number}, prompt {index}"
        return self._request(name, "prompt", self.spec.prompt_tokens, self.spec.answer_tokens)

    def stream(self, round_number: int, slot: int, index: int) -> Request:
        """The request that a slot of the running streams makes as its number ``index``."""
        name = f"round {round_number}, stream {slot}.{index}"
        return self._request(name, "stream", self.spec.stream_prompt_tokens, self.spec.stream_tokens)

    def pause(self, round_number: int, index: int) -> float:
        """Seconds between the answer of long prompt ``index`` and the next one: out of step with the engines."""
        return self._source(f"round {round_number}, pause {index}").uniform(0, self.spec.pause_s)

    def _request(self, name: str, kind: Kind, tokens: int, answer_tokens: int) -> Request:
        source = self._source(name)
        ids: list[int] = []
        while len(ids) < tokens:
            ids += source.choice(self._words)
        return Request(name=name, kind=kind, prompt_ids=tuple(ids[:tokens]), answer_tokens=answer_tokens)

    def _source(self, name: str) -> random.Random:
        return random.Random(f"{self.spec.seed}: {name}")
