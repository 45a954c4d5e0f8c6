"""Gumbel noise as a pure function of (seed, position, token id): no generator, no state, no order of calls.

The bits are those of splitmix64 (Steele, Lea, Flood 2014) used as a counter-based generator: the stream's key is mixed
from seed and position, and the token id is the counter. int64 tensors wrap around as the 64-bit arithmetic needs.
"""

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def mix(value: int) -> int:
    """The finalizer of splitmix64, on the low 64 bits of a Python integer."""
    value &= _MASK
    value = ((value ^ (value >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> _SHIFTS[2])


def stream_key(seed: int, position: int) -> int:
    """The key of one pick's noise, as a signed 64-bit integer."""
    return _signed(mix(mix(seed + _GAMMA) ^ (position * _GAMMA & _MASK)))


def _mix_in_place(values: Tensor) -> None:
    scratch = torch.empty_like(values)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        # A logical shift: the arithmetic one, less the copies of the sign.
        torch.bitwise_right_shift(values, shift, out=scratch)
        scratch &= 2 ** (64 - shift) - 1
        values ^= scratch
        if multiplier is not None:
            values *= _signed(multiplier)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise.

    Args:
        keys: int64 [S], from ``stream_key``.
        token_ids: int64 [C] for all streams, or [S, C].

    Returns:
        float32 [S, C]. Small probabilities keep their relative precision: the uniform number has 63 bits.
    """
    bits = (token_ids + 1) * _signed(_GAMMA) + keys.unsqueeze(1)
    _mix_in_place(bits)
    bits &= 2**63 - 1
    uniform = bits.float().mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
