"""The toy model's arithmetic and its oracle, from token ids alone. No torch; see ``model.toy`` for what it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry_runtime.model.toy_spec import ToySpec

CANDIDATE_SCORES = (8.0, 7.0, 6.0, 5.0)
OTHER_SCORE = -100.0

MASK = 2**64 - 1
_TOKEN = 0x9E3779B97F4A7C15
_POSITION = 0xC2B2AE3D27D4EB4F
ROOT = 0x165667B19E3779F9
STEP = 0x27D4EB2F165667C5


def _mix(value: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit integers in which each input bit moves every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def digest_of(token: int, position: int, previous: int) -> int:
    """d(p) of the token at a position, given d(p - 1)."""
    return _mix(previous ^ (token * _TOKEN & MASK) ^ ((position + 1) * _POSITION & MASK))


def position_weight(position: int) -> int:
    """w(i)."""
    return _mix(position + 0x51ED270B) | 1


def element_weights(elements: int) -> list[tuple[int, int]]:
    """(u, u') of each element; their difference is odd, so that no change of K with its complement in V cancels."""
    return [(_mix(2 * e + 1) | 1, _mix(2 * e + 2) & ~1 & MASK) for e in range(elements)]


def candidates_of(state: int, spec: ToySpec) -> tuple[int, ...]:
    """Four distinct token ids, best first; the end-of-sequence token takes the first place when it is due."""
    low, count = spec.emit_range()
    value = _mix(state)
    start, step = value % count, 1 + (value >> 32) % (count // len(CANDIDATE_SCORES))
    picked = [low + (start + index * step) % count for index in range(len(CANDIDATE_SCORES))]
    if spec.eos_every and _mix(value) % spec.eos_every == 0:
        picked[0] = spec.eos_token_id
    return tuple(picked)


@dataclass
class ToyOracle:
    """The toy model without KV: fed with token ids one after another."""

    spec: ToySpec
    position: int = 0
    _digest: int = ROOT
    _state: int = 0

    def __post_init__(self) -> None:
        self._scale = 0
        self._shift = 0
        for element, (k_weight, v_weight) in enumerate(element_weights(self.spec.elements)):
            offset = element * STEP
            # u * (d + offset) + u' * ~(d + offset), with ~x = -x - 1
            self._scale += k_weight - v_weight
            self._shift += k_weight * offset - v_weight * (offset + 1)

    def feed(self, token: int) -> None:
        """Append one token to the sequence."""
        self._digest = digest_of(token, self.position, self._digest)
        weight = position_weight(self.position)
        self._state = (self._state + weight * (self._scale * self._digest + self._shift)) & MASK
        self.position += 1

    def candidates(self) -> tuple[int, ...]:
        """The four candidates for the next token, best first; their scores are ``CANDIDATE_SCORES``."""
        return candidates_of(self._state, self.spec)


def toy_next_tokens(prompt_ids: Sequence[int], n: int, spec: ToySpec | int = 512) -> list[int]:
    """The greedy continuation of ``prompt_ids`` by ``n`` tokens, or up to and including end-of-sequence.

    Args:
        spec: the model, or only its vocabulary size.
    """
    resolved = ToySpec(vocab=spec) if isinstance(spec, int) else spec
    picked: list[int] = []
    for candidates in toy_walk(prompt_ids, picked, resolved):
        if len(picked) == n or (picked and picked[-1] == resolved.eos_token_id):
            break
        picked.append(candidates[0])
    return picked


def toy_walk(prompt_ids: Sequence[int], picked: list[int], spec: ToySpec) -> Iterator[tuple[int, ...]]:
    """Yield the candidates after the prompt, then after each token that the caller appends to ``picked``."""
    oracle = ToyOracle(spec)
    for token in prompt_ids:
        oracle.feed(token)
    seen = 0
    while True:
        yield oracle.candidates()
        if seen == len(picked):
            return
        oracle.feed(picked[seen])
        seen += 1


def toy_scores(candidates: Sequence[int], spec: ToySpec) -> list[float]:
    """The whole score row that the model gives for these candidates."""
    scores = [OTHER_SCORE] * spec.vocab
    for token, score in zip(candidates, CANDIDATE_SCORES, strict=True):
        scores[token] = score
    return scores
