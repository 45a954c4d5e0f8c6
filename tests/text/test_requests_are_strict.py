"""What a request may say, and how a wrong one is refused."""

from typing import Any

import pytest

from kvferry_text.errors import ApiError
from kvferry_text.openai.parameters import UNSUPPORTED
from tests.text.builders import default_tools, make_tools, prepare_body


def refusal(kind: Any = "chat", **changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        prepare_body(kind, **changes)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", [1]),
        ("min_p", -1),
        ("top_k", 1.5),
        ("top_k", -2),
        ("top_k", True),
        ("max_tokens", "5"),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 5.0),
        ("max_tokens", False),
        ("max_completion_tokens", "5"),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("seed", "1"),
        ("n", 0),
        ("n", 9),
        ("n", 10**400),
        ("n", True),
        ("stream", 1),
        ("stream", "true"),
        ("ignore_eos", 0),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", ["a"] * 17),
        ("stop", "x" * 257),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**9]),
        ("stop_token_ids", list(range(65))),
        ("user", 5),
        ("user", "u" * 513),
        ("model", 5),
        ("model", None),
        ("model", ""),
        ("model", ...),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_wrong_value_is_refused_by_its_field(kind: Any, field: str, value: Any) -> None:
    """A value of a wrong type or outside its range gives 400 that names the field."""
    error = refusal(kind, **{field: value})
    assert error.status == 400
    assert error.param == field
    assert field in error.message
    assert error.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (..., "messages"),
        (None, "messages"),
        ("hello", "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "a b"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
        ([{"role": "user", "content": "x"}] * 1025, "messages"),
    ],
)
def test_wrong_messages_are_refused_by_place(messages: Any, param: str) -> None:
    """A fault inside a conversation gives 400 whose param is the path to it."""
    error = refusal(messages=messages)
    assert (error.status, error.param) == (400, param)
    assert param in error.message


def test_a_part_that_is_not_text_is_named() -> None:
    """A content part of another type is refused with the type's name."""
    parts = [{"type": "text", "text": "x"}, {"type": "input_audio", "input_audio": {}}]
    error = refusal(messages=[{"role": "user", "content": parts}])
    assert "input_audio" in error.message


@pytest.mark.parametrize(
    "prompt",
    [
        ...,
        None,
        5,
        {},
        [],
        [[]],
        "",
        [""],
        ["", "a"],
        ["a", "b"],
        [[1], [2]],
        [-1],
        [[-1]],
        [10**6],
        [[2147483648]],
        [2**70],
        [1, "a"],
        [1.5],
        [True],
        [None],
        [[[1]]],
    ],
)
def test_wrong_prompts_are_refused(prompt: Any) -> None:
    """Empty prompts, several prompts and ids outside the vocabulary give 400 that names the prompt."""
    error = refusal("completion", prompt=prompt)
    assert (error.status, error.param) == (400, "prompt")


def test_an_id_outside_the_vocabulary_is_named() -> None:
    """The refusal says which id, where, and what is accepted."""
    size = default_tools().bundle.vocab_size
    error = refusal("completion", prompt=[1, 2, size])
    assert f"token id {size} at position 2 is outside 0..{size - 1}" in error.message


def test_an_empty_prompt_is_a_bos_where_the_model_wants_one() -> None:
    """With add_bos the empty prompt is the bos token alone."""
    tools = make_tools(add_bos=True)
    assert prepare_body("completion", tools, prompt="").prompt_ids == (1,)


def test_prompts_may_be_ids_or_wrapped_in_a_list() -> None:
    """A text, a list of one text, ids and a list of one list of ids are the same prompt."""
    text = prepare_body("completion", prompt="Hello there").prompt_ids
    ids = list(text)
    for prompt in (["Hello there"], ids, [ids]):
        assert prepare_body("completion", prompt=prompt).prompt_ids == text


ASKING: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "logit_bias": {"5": 1},
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "metadata": {"a": "b"},
    "store": True,
    "priority": 3,
    "repetition_penalty": 1.1,
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "modalities": ["text", "audio"],
    "service_tier": "flex",
    "skip_special_tokens": False,
    "detokenize": False,
    "parallel_tool_calls": "yes",
    "top_logprobs": 3,
    "verbosity": "low",
    "function_call": {"name": "f"},
    "suffix": "end",
    "length_penalty": 2,
}


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in ("chat", "completion") for field in UNSUPPORTED[kind]]
)
def test_an_unsupported_field_is_accepted_only_where_it_asks_for_nothing(kind: Any, field: str) -> None:
    """Each neutral value passes; a value that would have to be honoured gives 400 `unsupported_parameter`."""
    for neutral in UNSUPPORTED[kind][field]:
        prepare_body(kind, **{field: neutral})
    asking = ASKING.get(field, not any(neutral is True for neutral in UNSUPPORTED[kind][field]))
    error = refusal(kind, **{field: asking})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    assert field in error.message


def test_true_is_not_one_and_false_is_not_zero() -> None:
    """A neutral number does not let a boolean pass, nor the other way round."""
    assert refusal(frequency_penalty=False).param == "frequency_penalty"
    assert refusal(repetition_penalty=True).param == "repetition_penalty"
    assert refusal(store=0).param == "store"


def test_best_of_passes_only_as_n() -> None:
    """`best_of` is neutral when it equals n, given or not."""
    prepare_body("completion", best_of=1)
    prepare_body("completion", best_of=3, n=3)
    assert refusal("completion", best_of=2).param == "best_of"
    assert refusal("completion", best_of="1").param == "best_of"


def test_an_unknown_field_is_named() -> None:
    """A field that no API of ours or of a peer has gives 400 `unknown_parameter`."""
    error = refusal(temprature=0.5)
    assert (error.param, error.code) == ("temprature", "unknown_parameter")
    assert "temprature" in error.message


def test_stream_options_are_judged_as_well() -> None:
    """Unknown and unsupported stream options, and stream options without a stream, are refused by name."""
    assert refusal(stream=True, stream_options={"usage": True}).param == "stream_options.usage"
    continuous = {"continuous_usage_stats": True}
    assert refusal(stream=True, stream_options=continuous).param == "stream_options.continuous_usage_stats"
    assert refusal(stream=True, stream_options=True).param == "stream_options"
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
    assert prepare_body("chat", stream=True, stream_options={"include_usage": True}).include_usage
    prepare_body("chat", stream=True, stream_options={"include_usage": None, "include_obfuscation": False})


def test_all_faults_are_told_and_the_first_is_the_param() -> None:
    """One answer names every fault of a body."""
    error = refusal(temperature=5, top_p="x", tools=[{}], wat=1)
    for name in ("temperature", "top_p", "tools", "wat"):
        assert name in error.message
    assert error.param == "tools"


def test_many_faults_are_counted() -> None:
    """A body that is wrong in very many places gets a short answer, quickly."""
    error = refusal(**{f"field{index}": index for index in range(50_000)})
    assert len(error.message) < 1000
    assert "and 56 more" in error.message
    many = [{"role": 5, "content": 5, **{f"f{index}": 1 for index in range(50)}}] * 1000
    assert len(refusal(messages=many).message) < 2100


def test_a_long_field_name_is_cut() -> None:
    """An absurd field name is echoed in part only."""
    error = refusal(**{"x" * 100_000: 1})
    assert len(error.message) < 200
    assert error.param is not None and len(error.param) < 100


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": "my secret diary"},
        {"messages": [{"role": "user", "content": "x", "refusal": "my secret diary"}]},
        {"messages": [{"role": "user", "content": "x", "name": "my secret diary"}]},
        {"user": ["my secret diary"]},
        {"stop": {"my secret diary": 1}},
        {"prompt_cache_key": "my secret diary"},
    ],
)
def test_errors_do_not_echo_text(changes: dict[str, Any]) -> None:
    """What may be prompt text is described by its type only."""
    assert "secret" not in refusal(**changes).message


def test_the_two_names_of_max_tokens_must_agree() -> None:
    """Either name sets the length; both may be given if they are equal."""
    assert prepare_body("chat", max_tokens=7).sampling.max_tokens == 7
    assert prepare_body("chat", max_completion_tokens=7).sampling.max_tokens == 7
    assert prepare_body("chat", max_tokens=7, max_completion_tokens=7).sampling.max_tokens == 7
    error = refusal(max_tokens=7, max_completion_tokens=8)
    assert error.param == "max_tokens" and "7" in error.message and "8" in error.message


def test_an_unknown_model_is_404_whatever_else_is_wrong() -> None:
    """The unknown name comes first, with OpenAI's code."""
    error = refusal(model="gpt-4o", temperature=99)
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_sampling_is_what_was_asked_for() -> None:
    """All supported fields reach the leg's sampling parameters."""
    prepared = prepare_body(
        "chat",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b", "a"],
        stop_token_ids=[5, 6, 5],
        ignore_eos=True,
        n=3,
        seed=77,
        user="someone",
    )
    sampling = prepared.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (9, 2, True)
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), (5, 6))
    assert (prepared.n, prepared.seed) == (3, 77)


def test_seeds_are_mapped_onto_the_leg_s_range() -> None:
    """Every int64 is accepted and always maps to the same value of 0..2**63-1; none given is none."""
    assert prepare_body("chat", seed=-1).seed == 2**63 - 1
    assert prepare_body("chat", seed=-(2**63)).seed == 0
    assert prepare_body("chat", seed=2**63 - 1).seed == 2**63 - 1
    assert prepare_body("chat", seed=0).seed == 0
    assert prepare_body("chat").seed is None


def test_top_k_off_has_two_spellings_and_is_capped_by_the_vocabulary() -> None:
    """0 and -1 switch it off; more than the vocabulary is the vocabulary."""
    assert prepare_body("chat", top_k=0).sampling.top_k == 0
    assert prepare_body("chat", top_k=-1).sampling.top_k == 0
    assert prepare_body("chat", top_k=2**31 - 1).sampling.top_k == default_tools().bundle.vocab_size


def test_a_temperature_next_to_zero_is_greedy() -> None:
    """Dividing logits by it would overflow, and it can only be meant as greedy."""
    assert prepare_body("chat", temperature=1e-300).sampling.temperature == 0.0


def test_generation_defaults_fill_what_the_client_left_out() -> None:
    """The model's recommended values apply where none, or null, was given, and nowhere else."""
    tools = make_tools(generation_defaults={"temperature": 0.6, "top_p": 0.8, "top_k": 20})
    sampling = prepare_body("chat", tools, top_p=None).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.8, 20)
    sampling = prepare_body("chat", tools, temperature=0, top_p=1, top_k=0).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)


def test_neutral_fields_of_an_answer_may_be_sent_back() -> None:
    """An assistant message as the client library dumps it is accepted in the next request."""
    dumped = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    question = {"role": "user", "content": "And you?"}
    assert (
        prepare_body("chat", messages=[dumped, question]).prompt_ids
        == prepare_body("chat", messages=[{"role": "assistant", "content": "Hi"}, question]).prompt_ids
    )


def test_a_developer_speaks_as_the_system_and_parts_are_joined() -> None:
    """Templates know no developer role; text parts are lines of one text."""
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
    developer = prepare_body("chat", messages=[{"role": "developer", "content": parts}]).prompt_ids
    assert developer == prepare_body("chat", messages=[{"role": "system", "content": "Be\nbrief"}]).prompt_ids


def test_reprs_show_no_text() -> None:
    """What lands in logs by accident holds no prompt."""
    prepared = prepare_body("completion", prompt="my secret diary", stop="secret", user="secret")
    assert "secret" not in repr(prepared) and str(prepared.prompt_ids[0]) not in repr(prepared).split("prompt=")[0]
