"""Whether a leg is taken: pure checks of it against the configuration and a few counts."""

from typing import NamedTuple

from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.messages import Submit
from kvferry_wire.frames import FailKind


class Refusal(NamedTuple):
    """Why a leg is not taken; the message is fit for the client."""

    kind: FailKind
    message: str


def fault_of(submit: Submit, config: CoreConfig) -> Refusal | None:
    """Why a leg can never be served by an engine of this configuration, or ``None``.

    The message names what was given and what is accepted.
    """
    message = _fault(submit, config)
    return None if message is None else Refusal("invalid", message)


def _fault(submit: Submit, config: CoreConfig) -> str | None:
    prompt = submit.prompt_ids
    if not prompt:
        return "the prompt has no token; at least one is needed"
    if submit.kind == "prefill" and submit.handle is not None:
        return "a prefill leg carries a KV handle; only a generate leg may"
    choices = len(submit.emitted)
    if not 1 <= choices <= config.limits.choices:
        return f"n is {choices}; 1 to {config.limits.choices} choices are accepted"
    if submit.sampling.max_tokens < 1:
        return f"max_tokens is {submit.sampling.max_tokens}; at least 1 is accepted"
    if len(prompt) >= config.max_model_len:
        return (
            f"the prompt has {len(prompt)} tokens; the context length is {config.max_model_len} tokens, prompt and "
            "answer together"
        )
    longest = max(len(emitted) for emitted in submit.emitted)
    if len(prompt) + longest > config.max_model_len:
        return (
            f"prompt and emitted ids have {len(prompt)} + {longest} tokens; the context length is "
            f"{config.max_model_len} tokens"
        )
    if config.vocab_size is not None:
        for name, ids in (("prompt", prompt), *(("emitted ids", emitted) for emitted in submit.emitted)):
            worst = max(ids, key=lambda token: token if token >= 0 else config.vocab_size or 0, default=0)
            if not 0 <= worst < config.vocab_size:
                return f"the {name} hold token id {worst}; ids from 0 to {config.vocab_size - 1} are accepted"
    return None


def queue_full(queued: int, config: CoreConfig) -> Refusal | None:
    """Whether one more leg may wait beside `queued` ones."""
    most = config.limits.queue
    return Refusal("busy", f"{queued} requests wait; at most {most} may") if queued >= most else None


def no_room_for_lease(submit: Submit, held: int, config: CoreConfig) -> Refusal | None:
    """Whether the prompt's blocks fit into the leases' share, of which `held` are held or promised.

    Refused before anything is computed: what could not be leased would be computed in vain. A prompt that needs more
    than the whole share is busy for ever here; a decode engine takes it alone.
    """
    need = config.blocks_for(len(submit.prompt_ids))
    if submit.kind != "prefill" or need + held <= config.lease_blocks:
        return None
    return Refusal("busy", f"the prompt needs {need} blocks under a lease; {held} of {config.lease_blocks} are held")


def handle_fault(submit: Submit, config: CoreConfig) -> str:
    """Why the leg's handle does not fit the leg: empty when it does; a label of ``transfer.reasons``."""
    handle = submit.handle
    if handle is None or (
        0 < handle.token_count <= len(submit.ferriable_ids())
        and handle.block_count == config.blocks_for(handle.token_count)
    ):
        return ""
    return "handle"
