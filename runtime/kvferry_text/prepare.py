"""A request body becomes a prepared request: validated, rendered, tokenized, and cut to the model's context.

The longest accepted text takes about a second to tokenize: callers with streams to serve run `prepare` in a thread
(tokenizing releases the interpreter lock).
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from kvferry_text import errors
from kvferry_text.bundle import generation_defaults
from kvferry_text.chat import ChatTemplate
from kvferry_text.chat_tokens import encode_chat
from kvferry_text.errors import shown
from kvferry_text.openai.parameters import Kind
from kvferry_text.openai.parse import parse_request
from kvferry_text.openai.requests import COMPLETION_MAX_TOKENS, ChatMessage, ChatRequest, CompletionRequest
from kvferry_text.tokenizer import TextTokenizer
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.leg import AnswerFormat, ChoiceState, Leg, Sampling
from kvferry_wire.limits import Limits
from kvferry_wire.pod import TextBundle

GREEDY_BELOW = 1e-5  # a lower temperature would overflow logits / temperature and can only be meant as greedy
SEED_RANGE = 2**63


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be served. Its ``repr`` shows no token and no stop string."""

    kind: Kind
    model: str  # as the client named it
    prompt_ids: tuple[int, ...]
    n: int
    sampling: Sampling  # its seed counts only if `seed` is given
    seed: int | None  # 0..2**63-1; None: not given, to be drawn
    stream: bool
    include_usage: bool

    def __repr__(self) -> str:
        return (
            f"PreparedRequest({self.kind}, prompt={len(self.prompt_ids)}, n={self.n}, "
            f"max_tokens={self.sampling.max_tokens}, stream={self.stream})"
        )


def prepare(  # noqa: PLR0917 - router and pods call it alike
    kind: Kind,
    body: bytes,
    bundle: TextBundle,
    tokenizer: TextTokenizer,
    template: ChatTemplate | None,
    limits: Limits,
    served_names: Collection[str],
    contexts: Sequence[int],
) -> PreparedRequest:
    """Make a request ready to be routed.

    Args:
        contexts: lengths of the contexts that could take it, at least one; the shortest that holds it is meant.

    Raises:
        ApiError: what the client is answered with instead; see ``parse_request`` and the errors of this module.
    """
    request = parse_request(kind, body, limits, served_names)
    if isinstance(request, ChatRequest):
        param, prompt_ids = "messages", _chat_ids(request, tokenizer, template, limits)
    else:
        param, prompt_ids = "prompt", _completion_ids(request, bundle, tokenizer, limits)
    max_tokens = _max_tokens(request, param, len(prompt_ids), contexts)
    return PreparedRequest(
        kind=kind,
        model=request.model,
        prompt_ids=tuple(prompt_ids),
        n=request.n or 1,
        sampling=_sampling(request, bundle, max_tokens),
        seed=None if request.seed is None else request.seed % SEED_RANGE,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def first_leg(
    prepared: PreparedRequest,
    *,
    internal_id: str,
    request_id: str,
    response_id: str,
    created: int,
    seed: int,
    deadline_ms: int,
    extras: KeyExtras,
    attempt: int = 0,
) -> Leg:
    """The leg that a request starts with.

    Args:
        internal_id: unique in the service.
        request_id: the client's ``x-request-id``.
        response_id: ``chatcmpl-...`` or ``cmpl-...``.
        created: Unix seconds, as the client sees it.
        seed: drawn at random; used only where the client gave none.
        deadline_ms: time remaining.
        extras: whose KV it is.
        attempt: counts the request's legs.
    """
    used_seed = prepared.seed if prepared.seed is not None else seed % SEED_RANGE
    return Leg(
        internal_id=internal_id,
        attempt=attempt,
        request_id=request_id,
        deadline_ms=deadline_ms,
        prompt_ids=prepared.prompt_ids,
        choices=(ChoiceState(),) * prepared.n,
        sampling=msgspec.structs.replace(prepared.sampling, seed=used_seed),
        format=AnswerFormat(
            kind=prepared.kind,
            stream=prepared.stream,
            include_usage=prepared.include_usage,
            response_id=response_id,
            created=created,
            model=prepared.model,
        ),
        extras=extras,
    )


# ---- prompt --------------------------------------------------------------------------------------------------------


def _chat_ids(
    request: ChatRequest, tokenizer: TextTokenizer, template: ChatTemplate | None, limits: Limits
) -> list[int]:
    _check_chars(sum(len(message.content) for message in request.messages), "messages", limits)
    if template is None:
        message = "this model has no chat template; use /v1/completions"
        raise errors.bad_request(message, param="messages", code="no_chat_template")
    ids = encode_chat(template, tokenizer, [_template_message(message) for message in request.messages])
    if not ids:
        raise errors.bad_request("messages make an empty prompt", param="messages")
    return ids


def _template_message(message: ChatMessage) -> Mapping[str, str]:
    role = "system" if message.role == "developer" else message.role  # templates know no developer
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.content, **named}


def _completion_ids(
    request: CompletionRequest, bundle: TextBundle, tokenizer: TextTokenizer, limits: Limits
) -> list[int]:
    if isinstance(request.prompt, tuple):
        _check_ids(request.prompt, bundle.vocab_size)
        return list(request.prompt)
    _check_chars(len(request.prompt), "prompt", limits)
    ids = tokenizer.encode(request.prompt, special=True, add_bos=bundle.add_bos)
    if not ids:
        raise errors.bad_request("prompt must not be empty", param="prompt")
    return ids


def _check_chars(chars: int, param: str, limits: Limits) -> None:
    if chars > limits.text_chars:
        message = f"{param} holds {chars} characters of text; at most {limits.text_chars} are accepted"
        raise errors.bad_request(message, param=param, code="string_above_max_length")


def _check_ids(ids: tuple[int, ...], vocab_size: int) -> None:
    if min(ids) >= 0 and max(ids) < vocab_size:
        return
    index = next(index for index, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
    message = f"prompt: token id {shown(ids[index])} at position {index} is outside 0..{vocab_size - 1}"
    raise errors.bad_request(message, param="prompt")


# ---- limits and sampling -------------------------------------------------------------------------------------------


def _max_tokens(request: ChatRequest | CompletionRequest, param: str, prompt: int, contexts: Sequence[int]) -> int:
    """Tokens an answer may have, as the client said or as the context allows."""
    given = request.max_tokens if request.max_tokens is not None else request.max_completion_tokens
    usual = COMPLETION_MAX_TOKENS if isinstance(request, CompletionRequest) else 1
    wanted = prompt + (usual if given is None else given)
    context = min((length for length in contexts if length >= wanted), default=max(contexts))
    room = context - prompt
    if room < 1:
        message = f"the prompt has {prompt} tokens; the model's context is {context}, answer included"
        raise errors.context_length_exceeded(message, param=param)
    if given is not None and given > room:
        name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        message = (
            f"the prompt has {prompt} tokens and {name} is {shown(given)}; "
            f"the model's context is {context}, so at most {room} fit"
        )
        raise errors.context_length_exceeded(message, param=name)
    if given is not None:
        return given
    return min(room, COMPLETION_MAX_TOKENS) if isinstance(request, CompletionRequest) else room


def _sampling(request: ChatRequest | CompletionRequest, bundle: TextBundle, max_tokens: int) -> Sampling:
    defaults = generation_defaults(bundle)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"min_tokens is {shown(min_tokens)}, but the answer has at most {max_tokens} tokens"
        raise errors.bad_request(message, param="min_tokens")
    for token_id in request.stop_token_ids:
        if not 0 <= token_id < bundle.vocab_size:
            message = f"stop_token_ids holds {shown(token_id)}, which is outside 0..{bundle.vocab_size - 1}"
            raise errors.bad_request(message, param="stop_token_ids")
    temperature = defaults.temperature if request.temperature is None else request.temperature
    top_k = defaults.top_k if request.top_k is None else request.top_k
    return Sampling(
        seed=0,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        top_k=0 if top_k <= 0 else min(top_k, bundle.vocab_size),
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
    )
