"""Whether a leg may be started: what can be said from the leg alone, before the engine is asked. Pure."""

import math

from kvferry_wire.frames import Fail
from kvferry_wire.leg import Leg, Sampling
from kvferry_wire.limits import Limits
from kvferry_wire.pod import TextBundle

_ID_CHARS = 128
_ATTEMPTS = 2**31
_TOKENS = 2**31


def leg_fault(leg: Leg, bundle: TextBundle, limits: Limits) -> Fail | None:
    """The first reason why this leg cannot be served at all, or ``None``."""
    if not (0 < len(leg.internal_id) <= _ID_CHARS and leg.internal_id.isprintable()):
        return _invalid("internal_id", f"internal_id: 1 to {_ID_CHARS} printable characters are accepted")
    if not 0 <= leg.attempt < _ATTEMPTS:
        return _invalid("attempt", f"attempt: {leg.attempt} given; 0 to {_ATTEMPTS - 1} is accepted")
    if leg.deadline_ms <= 0:
        return Fail(kind="deadline", message="The request's time is up.")
    if not 1 <= len(leg.choices) <= limits.choices:
        return _invalid("n", f"n: {len(leg.choices)} choices given; 1 to {limits.choices} are accepted")
    return _ids_fault(leg, bundle) or _sampling_fault(leg.sampling, bundle, limits)


def context_fault(leg: Leg, max_model_len: int) -> Fail | None:
    """Whether a leg's whole answer has room here. Where it has not, another pod may serve it: it is not cut short."""
    whole = len(leg.prompt_ids) + leg.sampling.max_tokens
    if whole <= max_model_len:
        return None
    return Fail(kind="draining", message=f"Prompt and answer may have {whole} tokens; this pod takes {max_model_len}.")


def _ids_fault(leg: Leg, bundle: TextBundle) -> Fail | None:
    if not leg.prompt_ids:
        return _invalid("prompt", "prompt: no token given; at least one is needed")
    for name, ids in (("prompt", leg.prompt_ids), *(("emitted", choice.emitted) for choice in leg.choices)):
        if ids and not (min(ids) >= 0 and max(ids) < bundle.vocab_size):
            return _invalid(name, f"{name}: a token id outside 0..{bundle.vocab_size - 1} given")
    if any(choice.chars_sent < 0 for choice in leg.choices):
        return _invalid("chars_sent", "chars_sent: a negative number given")
    return None


def _sampling_fault(sampling: Sampling, bundle: TextBundle, limits: Limits) -> Fail | None:
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("seed", sampling.seed, 0, 2**63 - 1),
        ("max_tokens", sampling.max_tokens, 1, _TOKENS - 1),
        ("min_tokens", sampling.min_tokens, 0, sampling.max_tokens),
        ("temperature", sampling.temperature, 0, 100),
        ("top_p", sampling.top_p, 0, 1),
        ("top_k", sampling.top_k, 0, 2**31 - 1),
        ("min_p", sampling.min_p, 0, 1),
        ("stop", len(sampling.stop), 0, limits.stop_strings),
        ("stop_token_ids", len(sampling.stop_token_ids), 0, limits.stop_token_ids),
    )
    for name, value, low, high in ranges:
        if not (math.isfinite(value) and low <= value <= high):
            return _invalid(name, f"{name}: {value} given; {low:g} to {high:g} is accepted")
    if any(not 0 < len(stop) <= limits.stop_string_chars for stop in sampling.stop):
        return _invalid("stop", f"stop: strings of 1 to {limits.stop_string_chars} characters are accepted")
    if any(not 0 <= token < bundle.vocab_size for token in sampling.stop_token_ids):
        return _invalid("stop_token_ids", f"stop_token_ids: ids of 0..{bundle.vocab_size - 1} are accepted")
    return None


def _invalid(param: str, message: str) -> Fail:
    return Fail(kind="invalid", message=message, param=param)
