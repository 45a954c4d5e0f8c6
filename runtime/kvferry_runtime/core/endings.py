"""When a choice has ended. One rule, for ids just picked and for ids that a leg brings along."""

from collections.abc import Sequence
from typing import NamedTuple

from kvferry_runtime.core.messages import Finish
from kvferry_wire.leg import Sampling


class Ending(NamedTuple):
    """Why a choice ended; `stop_token` only for an id that the user named."""

    finish: Finish
    stop_token: int | None


def ending(
    sampling: Sampling, eos_token_ids: tuple[int, ...], emitted: Sequence[int], prompt_len: int, max_model_len: int
) -> Ending | None:
    """Judge a choice by its emitted ids; ``None`` while it goes on.

    A natural end is told before a length: an end-of-sequence token as the last allowed one is 'stop'.
    """
    if emitted:
        last = emitted[-1]
        if last in sampling.stop_token_ids:
            return Ending("stop", last)
        if last in eos_token_ids and not sampling.ignore_eos:
            return Ending("stop", None)
    if len(emitted) >= sampling.max_tokens or prompt_len + len(emitted) >= max_model_len:
        return Ending("length", None)
    return None


def banned_ids(sampling: Sampling, eos_token_ids: tuple[int, ...], emitted: int) -> tuple[int, ...]:
    """Ids that must not be picked after so many emitted ones: every end-of-sequence and stop id before `min_tokens`."""
    if emitted >= sampling.min_tokens:
        return ()
    return tuple(dict.fromkeys((*eos_token_ids, *sampling.stop_token_ids)))
