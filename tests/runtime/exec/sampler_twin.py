"""The sampler written again, one token at a time, in plain Python floats: what the vectorised one is compared with."""

import math
from collections.abc import Sequence

from kvferry_runtime.core.plan import Pick

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def splitmix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def noise(seed: int, position: int, token: int) -> float:
    """Gumbel noise of one token."""
    key = splitmix(splitmix(seed + _GAMMA) ^ (position * _GAMMA & _MASK))
    uniform = (splitmix(key + (token + 1) * _GAMMA) & (2**63 - 1)) * 2.0**-63
    return -math.log(-math.log1p(-min(max(uniform, 2.0**-64), 1 - 2.0**-24)))


def pick_one(logits: Sequence[float], pick: Pick) -> tuple[int, float]:
    """The picked id, and by how much it was ahead: of the runner-up, or of the cut of a filter."""
    sampling = pick.sampling
    allowed = {token: score for token, score in enumerate(logits) if token not in pick.banned}
    order = sorted(allowed, key=lambda token: (-allowed[token], token))
    if sampling.temperature == 0:
        return order[0], _lead([allowed[token] for token in order])
    scaled = {token: score / sampling.temperature for token, score in allowed.items()}
    best = scaled[order[0]]
    kept, cut = order, math.inf
    if sampling.min_p > 0:
        floor = best + math.log(sampling.min_p)
        cut = min(cut, min(abs(scaled[token] - floor) for token in order))
        kept = [token for token in kept if scaled[token] >= floor]
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1:
        weights = [math.exp(scaled[token] - best) for token in kept]
        total, mass, length = sum(weights), 0.0, 0
        for weight in weights:
            if length:  # the best one is always kept
                cut = min(cut, abs(mass / total - sampling.top_p))
            if length and mass / total >= sampling.top_p:
                break
            mass += weight
            length += 1
        kept = kept[: max(1, length)]
    noisy = {token: scaled[token] + noise(pick.seed, pick.position, token) for token in kept}
    ranking = sorted(noisy, key=lambda token: (-noisy[token], token))
    return ranking[0], min(cut, _lead([noisy[token] for token in ranking]))


def _lead(falling: list[float]) -> float:
    return falling[0] - falling[1] if len(falling) > 1 else math.inf
