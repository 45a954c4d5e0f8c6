"""Chat templates: rendered as Hugging Face renders them, in a sandbox, with a cap."""

import warnings
from datetime import UTC, datetime
from typing import Any

import pytest

from kvferry_text.bundle import BundleError
from kvferry_text.chat import ChatTemplate, TemplateSourceError
from kvferry_text.errors import ApiError
from tests.text.builders import CHATML, make_tools, prepare_body

USER = [{"role": "user", "content": "Hello <there> & 'you' é"}]
TALK = [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "Hi"}, *USER]

TRIMMED_BLOCKS = """{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {% if loop.first %}
{{ bos_token }}
    {% endif %}
    <{{ message.role }}> {{ message['content'] | trim }} {{ message | tojson }}
    {{ message.content.split(' ') | tojson(indent=2) }}
{% endfor %}
{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
NAMESPACE = """{% set ns = namespace(n=0) %}{% for m in messages[1:] %}{% set ns.n = ns.n + 1 %}
{{ ns.n }}:{{ m.content }}{{ eos_token }}{% endfor %}"""
DATED = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}{{ messages[0]['content'] }}"


def template(source: str, **changes: Any) -> ChatTemplate:
    return ChatTemplate(source, **{"bos_token": "<s>", "eos_token": "</s>", "max_chars": 10_000, **changes})


@pytest.mark.parametrize("source", [CHATML, TRIMMED_BLOCKS, NAMESPACE])
@pytest.mark.parametrize("messages", [USER, TALK])
def test_rendering_equals_hugging_face(source: str, messages: list[dict[str, str]]) -> None:
    """The same text as transformers' own renderer makes of template and messages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils.chat_template_utils import render_jinja_template

        expected, _ = render_jinja_template(
            conversations=[messages],
            chat_template=source,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
        )
    assert template(source).render(messages) == expected[0]


def test_the_date_is_not_seen_unless_a_clock_is_given() -> None:
    """A prompt depends on the request alone; a clock is an explicit choice."""
    assert template(DATED).render(USER).startswith("2024")
    clock = lambda: datetime(2031, 1, 2, tzinfo=UTC)  # noqa: E731
    assert template(DATED, clock=clock).render(USER).startswith("2031")


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | nofilter }}", "{% for %}", "{{ 'a' ", "{% unknown %}"])
def test_a_template_that_does_not_compile_is_an_error_at_load(source: str) -> None:
    """The fault shows when the model is loaded, not at the first request."""
    with pytest.raises(TemplateSourceError, match="chat template does not compile"):
        template(source)
    with pytest.raises(BundleError, match="chat template does not compile"):
        make_tools(chat_template=source)


def test_what_the_template_says_reaches_the_client() -> None:
    """`raise_exception` is a 400 with its text."""
    source = "{{ raise_exception('Conversation roles must alternate user/assistant') }}"
    with pytest.raises(ApiError, match="roles must alternate") as caught:
        template(source).render(USER)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_refusal_that_quotes_a_message_is_not_passed_on() -> None:
    """No prompt text in an error, and no endless one."""
    with pytest.raises(ApiError) as caught:
        template("{{ raise_exception('bad: ' + messages[0].content) }}").render(USER)
    assert "there" not in caught.value.message
    with pytest.raises(ApiError) as caught:
        template("{{ raise_exception('x' * 5000) }}").render(USER)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ nothing.attribute }}",
        "{{ messages[0].content.nothing() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ nothing | tojson }}",
    ],
)
def test_a_rendering_that_fails_is_a_400(source: str) -> None:
    """Whatever a template raises, sandbox violations included, is the request's fault and quotes nothing."""
    with pytest.raises(ApiError) as caught:
        template(source).render(USER)
    assert caught.value.status == 400 and "there" not in caught.value.message


def test_the_rendered_size_is_capped() -> None:
    """Rendering stops at the cap and does not first build the whole."""
    source = "{% for a in range(50000) %}{% for b in range(50000) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(ApiError, match="more than 10000 characters"):
        template(source).render(USER)


def test_an_empty_rendering_is_refused() -> None:
    """A template that makes nothing of the messages gives no empty prompt."""
    with pytest.raises(ApiError, match="empty prompt"):
        prepare_body("chat", make_tools(chat_template="{{ '' }}"))
