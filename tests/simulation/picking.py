"""How the simulation picks among the toy model's candidates: greedy, or by noise keyed by seed, position and token."""

import math
from collections.abc import Sequence
from hashlib import blake2b

from kvferry_runtime.model.toy_oracle import CANDIDATE_SCORES
from kvferry_wire.leg import Sampling


def pick_token(
    candidates: Sequence[int], sampling: Sampling, seed: int, position: int, banned: Sequence[int] = ()
) -> int:
    """The token; depends on nothing but the arguments."""
    allowed = [pair for pair in zip(CANDIDATE_SCORES, candidates, strict=True) if pair[1] not in banned]
    if sampling.temperature == 0.0:
        return allowed[0][1]
    if sampling.top_k:
        allowed = allowed[: sampling.top_k]
    scored = [(score / sampling.temperature + _gumbel(seed, position, token), token) for score, token in allowed]
    return max(scored)[1]


def _gumbel(seed: int, position: int, token: int) -> float:
    name = b"%d/%d/%d" % (seed, position, token)
    uniform = (int.from_bytes(blake2b(name, digest_size=8).digest(), "little") + 0.5) / 2**64
    return -math.log(-math.log(uniform))
