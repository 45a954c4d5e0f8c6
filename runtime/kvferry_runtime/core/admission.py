"""Whether a leg is taken: the checks that need no knowledge of queues."""

from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.messages import Submit


def fault_of(submit: Submit, config: CoreConfig) -> str | None:
    """Why a leg can never be served by an engine of this configuration, or ``None``.

    The message names what was given and what is accepted; it is fit for the client.
    """
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


def handle_fault(submit: Submit, config: CoreConfig) -> str:
    """Why the leg's handle does not fit the leg: empty when it does; a label of ``transfer.reasons``."""
    handle = submit.handle
    if handle is None or (
        handle.token_count == len(submit.prompt_ids) and handle.block_count == config.blocks_for(handle.token_count)
    ):
        return ""
    return "handle"
