"""Chat messages to the model's prompt text, by the model's own Jinja template in a sandbox.

The environment is the one that Hugging Face templates are written for (trimmed blocks, ``raise_exception``, ``tojson``
that keeps characters as they are, loop controls), with one difference: ``strftime_now`` is not defined unless a clock
is given, so that a prompt depends on the request alone. Templates test for it and fall back to a fixed date.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry_text import errors

MESSAGE_CHARS = 200
_TELLING_CHARS = 4  # content shorter than this is in any message by chance

# What a template can raise on messages it was not written for.
_RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class TemplateSourceError(ValueError):
    """The model's chat template cannot be used: it does not compile."""


class _RaisedError(TemplateError):
    """``raise_exception`` was called by the template: its text is meant for the user."""


class ChatTemplate:
    """A compiled chat template; shared by threads.

    Args:
        source: Jinja source, from the model.
        bos_token: text of the model's tokens, which templates write at will.
        eos_token: likewise.
        max_chars: of the rendered prompt.
        clock: the time for ``strftime_now``; without it the template does not see that function.

    Raises:
        TemplateSourceError: on construction, for a source that does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        max_chars: int,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,  # a prompt is no HTML
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        if clock is not None:
            environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateSourceError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, TemplateError) as error:
            raise TemplateSourceError(f"the chat template does not compile: {error}") from error
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._max_chars = max_chars

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text for a conversation, ready for the assistant's answer.

        Raises:
            ApiError: 400 when the template refuses the messages or fails on them, or when the prompt is too long.
        """
        pieces: list[str] = []
        chars = 0
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._tokens
            ):
                chars += len(piece)
                if chars > self._max_chars:
                    break
                pieces.append(piece)
        except _RaisedError as error:
            raise errors.bad_request(_refusal(str(error), messages), param="messages") from None
        except _RENDER_ERRORS as error:
            # The text of other errors may quote the messages.
            message = f"the model's chat template fails on these messages ({type(error).__name__})"
            raise errors.bad_request(message, param="messages") from None
        if chars > self._max_chars:
            message = f"the chat template makes more than {self._max_chars} characters of these messages"
            raise errors.bad_request(message, param="messages")
        return "".join(pieces)


def _refusal(text: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The template's own words, unless they quote a message."""
    contents = (message["content"].strip() for message in messages)
    if any(len(content) >= _TELLING_CHARS and content in text for content in contents):
        return "the model's chat template refuses these messages"
    return f"the model's chat template refuses these messages: {text[:MESSAGE_CHARS]}"


def _raise(message: object) -> None:
    raise _RaisedError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
