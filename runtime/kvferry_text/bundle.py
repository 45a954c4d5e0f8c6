"""A text bundle made ready for use: tokenizer, chat template and generation defaults, checked once."""

import math
from typing import Any

import msgspec

from kvferry_text.chat import ChatTemplate, TemplateSourceError
from kvferry_text.tokenizer import BundleError, TextTokenizer
from kvferry_wire.limits import Limits
from kvferry_wire.pod import TextBundle


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's authors recommend, where a client gives no value."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class TextTools(msgspec.Struct, frozen=True, kw_only=True):
    """All that turns requests into legs and ids into answers, for one model."""

    bundle: TextBundle
    tokenizer: TextTokenizer
    template: ChatTemplate | None  # None: the model has none, chat is refused

    def __repr__(self) -> str:
        return f"TextTools(digest={self.bundle.digest[:12]}, template={self.template is not None})"


def load_text(bundle: TextBundle, limits: Limits) -> TextTools:
    """Build the tools of a bundle.

    Raises:
        BundleError: the tokenizer, the template or the generation defaults cannot be used; says which and why.
    """
    generation_defaults(bundle)
    return TextTools(bundle=bundle, tokenizer=TextTokenizer(bundle), template=_template(bundle, limits))


def _template(bundle: TextBundle, limits: Limits) -> ChatTemplate | None:
    if bundle.chat_template is None:
        return None
    try:
        return ChatTemplate(
            bundle.chat_template,
            bos_token=bundle.bos_token,
            eos_token=bundle.eos_token,
            max_chars=limits.rendered_chars,
        )
    except TemplateSourceError as error:
        raise BundleError(str(error)) from error


def generation_defaults(bundle: TextBundle) -> GenerationDefaults:
    """The bundle's generation defaults. Raises ``BundleError`` for a value outside what a client might send."""
    given = {name: value for name, value in bundle.generation_defaults.items() if value is not None}
    top_k = _number(given, "top_k", 0, -1, 2**31 - 1)
    return GenerationDefaults(
        temperature=_number(given, "temperature", 1.0, 0, 2),
        top_p=_number(given, "top_p", 1.0, math.ulp(0), 1),
        top_k=max(0, int(top_k)),
        min_p=_number(given, "min_p", 0.0, 0, 1),
    )


def _number(given: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BundleError(f"the model's generation default {name} is {value!r}; {low:g} to {high:g} are accepted")
    return value


__all__ = ["BundleError", "GenerationDefaults", "TextTools", "generation_defaults", "load_text"]
