"""Request fields that are known and not supported: accepted where they ask for nothing, refused by name otherwise.

A client library may send any of OpenAI's (or vLLM's) fields with its default. Each field here lists the values that
change nothing of the answer; another value would have to be honoured, so it is refused and never ignored.
"""

from collections.abc import Mapping
from typing import Literal

from kvferry_text.errors import Fault, shown

Kind = Literal["chat", "completion"]

NeutralValues = tuple[object, ...]

_NULL: NeutralValues = (None,)
_OFF: NeutralValues = (None, False)
_ON: NeutralValues = (None, True)
_ZERO: NeutralValues = (None, 0)
_ONE: NeutralValues = (None, 1)
_NONE_LISTED: NeutralValues = (None, [])
_EMPTY: NeutralValues = (None, {})

_BOTH: Mapping[str, NeutralValues] = {
    # OpenAI
    "frequency_penalty": _ZERO,
    "presence_penalty": _ZERO,
    "logit_bias": _EMPTY,
    "metadata": _EMPTY,
    "store": _OFF,
    "service_tier": (None, "auto", "default"),
    "prompt_cache_key": _NULL,
    "prompt_cache_retention": _NULL,
    "safety_identifier": _NULL,
    "response_format": (None, {"type": "text"}),
    # vLLM
    "add_special_tokens": _NULL,
    "allowed_token_ids": _NONE_LISTED,
    "bad_words": _NONE_LISTED,
    "cache_salt": _NULL,
    "detokenize": _ON,
    "guided_choice": _NULL,
    "guided_decoding_backend": _NULL,
    "guided_grammar": _NULL,
    "guided_json": _NULL,
    "guided_regex": _NULL,
    "guided_whitespace_pattern": _NULL,
    "include_stop_str_in_output": _OFF,
    "kv_transfer_params": _NULL,
    "length_penalty": _ONE,
    "logits_processors": _NULL,
    "mm_processor_kwargs": _EMPTY,
    "priority": _ZERO,
    "prompt_logprobs": _NULL,
    "repetition_penalty": _ONE,
    "request_id": _NULL,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "skip_special_tokens": _ON,
    "spaces_between_special_tokens": _ON,
    "structured_outputs": _NULL,
    "truncate_prompt_tokens": _NULL,
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
}

_CHAT: Mapping[str, NeutralValues] = {
    # OpenAI
    "audio": _NULL,
    "function_call": (None, "none", "auto"),
    "functions": _NONE_LISTED,
    "logprobs": _OFF,
    "modalities": (None, ["text"]),
    "moderation": _NULL,
    "parallel_tool_calls": (None, True, False),  # there are no tools to call
    "prediction": _NULL,
    "reasoning_effort": (None, "none"),
    "tool_choice": (None, "none", "auto"),
    "tools": _NONE_LISTED,
    "top_logprobs": _ZERO,
    "verbosity": (None, "medium"),
    "web_search_options": _NULL,
    # vLLM
    "add_generation_prompt": _ON,
    "chat_template": _NULL,
    "chat_template_kwargs": _EMPTY,
    "continue_final_message": _OFF,
    "documents": _NONE_LISTED,
    "echo": _OFF,
    "include_reasoning": _ON,
}

_COMPLETION: Mapping[str, NeutralValues] = {
    # OpenAI; best_of is judged beside n
    "echo": _OFF,
    "logprobs": _NULL,
    "suffix": (None, ""),
    # vLLM
    "prompt_embeds": _NULL,
}

UNSUPPORTED: Mapping[Kind, Mapping[str, NeutralValues]] = {
    "chat": {**_BOTH, **_CHAT},
    "completion": {**_BOTH, **_COMPLETION},
}

STREAM_OPTIONS: Mapping[str, NeutralValues] = {
    "continuous_usage_stats": _OFF,
    "include_obfuscation": _OFF,
}

# What openai-python's `message.model_dump()` holds besides role and content, so that an answer can be sent back.
MESSAGE_FIELDS: Mapping[str, NeutralValues] = {
    "annotations": _NONE_LISTED,
    "audio": _NULL,
    "function_call": _NULL,
    "reasoning": _NULL,
    "reasoning_content": _NULL,
    "refusal": _NULL,
    "tool_call_id": _NULL,
    "tool_calls": _NONE_LISTED,
}


def is_neutral(value: object, neutral: NeutralValues) -> bool:
    """Whether a decoded JSON value is one of the neutral ones; true and 1 are different values."""
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral)


def unsupported(param: str, value: object, neutral: NeutralValues) -> Fault:
    """The fault of a known field that asks for something."""
    accepted = " or ".join(shown(known) if not isinstance(known, dict | list) else repr(known) for known in neutral)
    message = f"{param} is not supported: got {_given(value)}, accepted is {accepted} or leaving it out"
    return Fault(param, message, "unsupported_parameter")


def _given(value: object) -> str:
    return "a string" if isinstance(value, str) else shown(value)
