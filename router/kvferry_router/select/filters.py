"""Which pods cannot take the leg at all: each with the reason, for the explain API."""

from kvferry_router.flow_messages import Kind
from kvferry_router.select.candidates import Ask, Candidate


def why_not(kind: Kind, pod: Candidate, ask: Ask) -> str:
    """The first reason against a pod; empty when there is none."""
    if not pod.serves(kind):
        return f"its role is {pod.role}"
    if pod.name in ask.excluded:
        return "it failed on this request"
    if not pod.ready:
        return "not ready"
    if pod.draining or (pod.load is not None and pod.load.draining):
        return "draining"
    if pod.text_digest != ask.text_digest:
        return "another tokenizer or chat template"
    if ask.compat_hash not in ("", pod.compat_hash):
        return "another model or layout of KV than the answer was begun with"
    # Prefill computes no further than the answer's first token.
    if ask.prompt_tokens + (ask.answer_tokens if kind == "decode" else 1) > pod.max_model_len:
        return f"its context is {pod.max_model_len} tokens"
    if -(-ask.prompt_tokens // pod.block_size) > pod.total_blocks:
        return f"its KV cache holds {pod.total_blocks * pod.block_size} tokens"
    return ""
