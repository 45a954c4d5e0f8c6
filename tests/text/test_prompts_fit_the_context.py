"""Prompt and answer share the model's context; what does not fit is refused with both numbers."""

from typing import Any

import pytest

from kvferry_text.errors import ApiError
from kvferry_text.prepare import first_leg
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.text.builders import CONTEXT, MODEL, default_tools, prepare_body


def refusal(kind: Any, **changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        prepare_body(kind, **changes)
    return caught.value


def test_a_prompt_over_the_context_is_refused_with_both_lengths() -> None:
    """The error speaks of prompt and context, not of a max_tokens that nobody sent."""
    error = refusal("completion", prompt=[5] * (CONTEXT + 45))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    assert "557" in error.message and "512" in error.message and "max_tokens" not in error.message
    chat = refusal("chat", messages=[{"role": "user", "content": "hello " * 600}])
    assert (chat.code, chat.param) == ("context_length_exceeded", "messages")


def test_a_prompt_that_fills_the_context_leaves_no_room() -> None:
    """One token of answer must fit."""
    assert refusal("completion", prompt=[5] * CONTEXT).code == "context_length_exceeded"
    assert prepare_body("completion", prompt=[5] * (CONTEXT - 1)).sampling.max_tokens == 1


def test_an_explicit_length_that_does_not_fit_is_refused() -> None:
    """The error names prompt, asked length, context and what would fit; nothing is cut silently."""
    prepare_body("completion", prompt=[5] * 500, max_tokens=12)
    error = refusal("completion", prompt=[5] * 500, max_tokens=13)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    for number in ("500", "13", "512", "at most 12"):
        assert number in error.message
    chat = refusal("chat", max_completion_tokens=10**400)
    assert (chat.code, chat.param) == ("context_length_exceeded", "max_completion_tokens")


def test_a_chat_answer_may_fill_the_context_and_a_completion_has_16_tokens() -> None:
    """Where no length is given; the completion's default is cut to what fits."""
    prepared = prepare_body("chat")
    assert prepared.sampling.max_tokens == CONTEXT - len(prepared.prompt_ids)
    assert prepare_body("completion").sampling.max_tokens == 16
    assert prepare_body("completion", max_tokens=None).sampling.max_tokens == 16
    assert prepare_body("completion", prompt=[5] * 505).sampling.max_tokens == 7


@pytest.mark.parametrize(
    ("kind", "prompt", "given", "most"),
    [
        ("completion", 400, 112, 112),  # the short one holds it
        ("completion", 400, 113, 113),  # only the long one does
        ("completion", 500, None, 16),  # the short one has no room for a completion's usual 16
        ("completion", 1020, None, 4),
        ("chat", None, None, None),  # all that the short one has
    ],
)
def test_a_request_is_meant_for_the_shortest_context_that_holds_it(
    kind: Any, prompt: int | None, given: int | None, most: int | None
) -> None:
    """While a rollout changes the context's length, pods have one or the other: all that fit may answer."""
    fields: dict[str, Any] = {} if prompt is None else {"prompt": [5] * prompt}
    prepared = prepare_body(kind, None, DEFAULT_LIMITS, (1024, 512), **fields, max_tokens=given)
    assert prepared.sampling.max_tokens == (512 - len(prepared.prompt_ids) if most is None else most)


def test_what_no_context_holds_is_refused_by_the_longest() -> None:
    """The error names the context that had most room."""
    with pytest.raises(ApiError) as caught:
        prepare_body("completion", None, DEFAULT_LIMITS, (512, 1024), prompt=[5] * 1000, max_tokens=25)
    assert "context is 1024, so at most 24 fit" in caught.value.message


def test_min_tokens_cannot_exceed_the_answer() -> None:
    """The bound may be given or come from the context."""
    prepare_body("chat", min_tokens=5, max_tokens=5)
    assert refusal("chat", min_tokens=6, max_tokens=5).param == "min_tokens"
    assert refusal("chat", min_tokens=10**400).param == "min_tokens"


def test_the_first_leg_carries_the_request() -> None:
    """Ids, n fresh choices, format and the drawn seed; a seed of the client wins."""
    prepared = prepare_body("completion", prompt=[5, 6], n=3, stream=True, stream_options={"include_usage": True})
    assert prepared.seed is None
    more: dict[str, Any] = {"response_id": "cmpl-1", "created": 7, "deadline_ms": 1000, "extras": KeyExtras()}
    leg = first_leg(prepared, internal_id="i", request_id="r", seed=2**63 + 5, **more)
    assert (leg.internal_id, leg.attempt, leg.request_id, leg.deadline_ms) == ("i", 0, "r", 1000)
    assert leg.prompt_ids == (5, 6) and len(leg.choices) == 3 and leg.sampling.seed == 5
    assert all(not choice.emitted and not choice.chars_sent for choice in leg.choices)
    assert (leg.format.kind, leg.format.stream, leg.format.include_usage) == ("completion", True, True)
    assert (leg.format.response_id, leg.format.created, leg.format.model) == ("cmpl-1", 7, MODEL)
    seeded = first_leg(prepare_body("chat", seed=9), internal_id="i", request_id="r", seed=1, **more)
    assert seeded.sampling.seed == 9


def test_a_model_without_template_refuses_chat() -> None:
    """The refusal says what to use in its place; completions work."""
    from tests.text.builders import make_tools

    tools = make_tools(chat_template=None)
    with pytest.raises(ApiError) as caught:
        prepare_body("chat", tools)
    assert caught.value.status == 400 and "no chat template; use /v1/completions" in caught.value.message
    assert prepare_body("completion", tools).prompt_ids == prepare_body("completion", default_tools()).prompt_ids
