"""What a request must be answered, from token ids alone; and how an answer looks on its way to the client.

One character stands for one byte token; end-of-sequence and the stop token that ended an answer have none. An event of
a stream is ``choice:first character:text``; events are separated by a zero byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry_runtime.model.toy_oracle import ToyOracle
from kvferry_runtime.model.toy_spec import BYTE_TOKENS
from kvferry_wire.leg import Sampling
from tests.simulation.models import SPEC, TOY, Model
from tests.simulation.picking import pick_token

DONE = b"\x01[DONE]"  # before the ending, at the end of a whole answer


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one choice. ``ids`` go on to where the engine would stop; ``text`` ends before a stop string.

    ``tokens``: those that belong to the answer.
    """

    ids: tuple[int, ...]
    text: str
    finish: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Ending:
    """What follows ``[DONE]`` in the simulation's answers."""

    finish: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    resumed: str

    def encode(self) -> bytes:
        counts = f"{self.prompt_tokens} {self.completion_tokens} {self.cached_tokens}"
        return DONE + "\x02".join((" ".join(self.finish), counts, self.resumed)).encode()


def read_ending(data: bytes) -> Ending:
    finish, counts, resumed = data.decode().split("\x02")
    prompt, completion, cached = (int(count) for count in counts.split())
    return Ending(tuple(finish.split()), prompt, completion, cached, resumed)


def oracle_answer(
    prompt: Sequence[int], sampling: Sampling, choice: int, max_model_len: int, model: Model = TOY
) -> Answer:
    """The one right answer of a choice."""
    spec = SPEC
    oracle = ToyOracle(spec)
    for token in prompt:
        oracle.feed(token)
    ids: list[int] = []
    seed = (sampling.seed + choice) % 2**63
    finish = ""
    while not finish:
        banned = (spec.eos_token_id, *sampling.stop_token_ids) if len(ids) < sampling.min_tokens else ()
        token = pick_token(model.candidates(oracle.candidates()), sampling, seed, len(prompt) + len(ids), banned)
        ids.append(token)
        oracle.feed(token)
        if token in sampling.stop_token_ids or (token == spec.eos_token_id and not sampling.ignore_eos):
            finish = "stop"
        elif len(ids) >= sampling.max_tokens or len(prompt) + len(ids) >= max_model_len:
            finish = "length"
    text, stopped = cut_at_stop(text_of(ids, sampling), sampling.stop)
    tokens = len(ids)
    if stopped:
        lengths = range(1, len(ids) + 1)
        tokens = next(n for n in lengths if cut_at_stop(text_of(ids[:n], sampling), sampling.stop)[1])
    return Answer(tuple(ids), text, "stop" if stopped else finish, tokens)


def text_of(ids: Sequence[int], sampling: Sampling) -> str:
    """Characters of a choice's ids."""
    shown = ids[:-1] if ids and ids[-1] in sampling.stop_token_ids else ids
    return "".join([chr(token) for token in shown if token < BYTE_TOKENS])


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there is one."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many last characters may be the beginning of a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def event(choice: int, first: int, text: str) -> bytes:
    return f"{choice}:{first}:{text}\0".encode("latin-1")


def events(data: bytes) -> list[tuple[int, int, str]]:
    """Read events back."""
    parsed = []
    for part in data.decode("latin-1").split("\0")[:-1]:
        choice, first, text = part.split(":", 2)
        parsed.append((int(choice), int(first), text))
    return parsed
