"""A conversation to token ids, such that nothing in a message becomes a control token.

Ordinary conversations are rendered and encoded in one go, which gives the ids that the model was trained on. Where a
message holds the string of a special token, or an edge that might complete one with its neighbours, the *guarded* way
is taken:

1. each such string in a message is put between two random marks and the template is rendered;
2. marked strings become placeholders, so that the special tokens found now are the template's own;
3. all text between those, the marked strings put back, is encoded as text, with the template's tokens in between.

Both ways give the same ids for ordinary text. A template that treats such a string in a message as its own (by
cutting a message at it, for example) may render differently with the marks around it; then the request is refused.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence

from kvferry_text import errors
from kvferry_text.chat import ChatTemplate
from kvferry_text.special_strings import Span, merged
from kvferry_text.tokenizer import TextTokenizer

Message = Mapping[str, str]


def encode_chat(template: ChatTemplate, tokenizer: TextTokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation's prompt.

    Raises:
        ApiError: 400 for messages that the template or the guard refuses.
    """
    spans = [_suspicious(tokenizer, message["content"]) for message in messages]
    if any(spans):
        return encode_chat_guarded(template, tokenizer, messages, spans)
    return tokenizer.encode(template.render(messages), special=True, add_bos=False)


def encode_chat_guarded(
    template: ChatTemplate, tokenizer: TextTokenizer, messages: Sequence[Message], spans: Sequence[Sequence[Span]]
) -> list[int]:
    """The guarded way, for the given spans of each message's content."""
    nonce = secrets.token_hex(8)
    # Private-use characters: no word characters, no whitespace, in no special token.
    opening, closing, placeholder = f"\ue000{nonce}\ue001", f"\ue002{nonce}\ue003", f"\ue004{nonce}\ue005"
    contents = [message["content"] for message in messages]
    marked = [
        {**message, "content": _marked(message["content"], inner, opening, closing)}
        for message, inner in zip(messages, spans, strict=True)
    ]
    rendered = template.render(marked)
    if rendered.replace(opening, "").replace(closing, "") != template.render(messages):
        raise _acted_on()
    pair = re.compile(f"{opening}((?:(?!{opening}).)*?){closing}", re.DOTALL)
    strings = pair.findall(rendered)
    known = {text[start:end] for text, inner in zip(contents, spans, strict=True) for start, end in inner}
    if not known.issuperset(strings):
        raise _acted_on()
    # A template that cuts a message at such a string leaves a mark alone; the string itself is gone then.
    hidden = pair.sub(placeholder, rendered).replace(opening, "").replace(closing, "")
    return tokenizer.encode_mixed(_parts(tokenizer, hidden, placeholder, iter(strings)))


def _suspicious(tokenizer: TextTokenizer, content: str) -> list[Span]:
    spans = tokenizer.special_strings.suspicious(content)
    if not tokenizer.normalizes_specials:
        return spans
    return merged([*spans, *((start, end) for start, end, _ in tokenizer.special_spans(content))])


def _parts(tokenizer: TextTokenizer, hidden: str, placeholder: str, strings: Iterator[str]) -> list[str | int]:
    """Cut a rendered prompt at the template's own special tokens, and put the strings back."""
    parts: list[str | int] = []
    position = 0
    for start, end, token_id in tokenizer.special_spans(hidden):
        parts += [_restored(hidden[position:start], placeholder, strings), token_id]
        position = end
    return [*parts, _restored(hidden[position:], placeholder, strings)]


def _restored(text: str, placeholder: str, strings: Iterator[str]) -> str:
    first, *others = text.split(placeholder)
    return first + "".join(next(strings) + other for other in others)


def _marked(content: str, spans: Sequence[Span], opening: str, closing: str) -> str:
    pieces, position = [], 0
    for start, end in spans:
        pieces += [content[position:start], opening, content[start:end], closing]
        position = end
    return "".join([*pieces, content[position:]])


def _acted_on() -> errors.ApiError:
    message = "messages hold the string of a control token, on which the model's chat template acts"
    return errors.bad_request(message, param="messages", code="control_token_in_content")
