"""Server-sent events: one whole JSON document per event.

Text is escaped so that no client can take a part of it for the end of a line: besides the ASCII control characters
that JSON escapes anyway, some clients split lines at U+0085, U+2028 and U+2029.
"""

import msgspec
from pydantic import BaseModel

from kvferry_text.errors import ApiError

DONE = b"data: [DONE]\n\n"

_PLACE = "\ue000text\ue000"
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x7f\x85\u2028\u2029"})
_encode = msgspec.json.Encoder().encode


def json_string(text: str) -> bytes:
    """A text as a JSON string in UTF-8, quotes included."""
    encoded = _encode(text)
    if text.isascii() and "\x7f" not in text:
        return encoded
    return encoded.decode().translate(_LINE_ENDS).encode()


def document(body: BaseModel) -> bytes:
    """A model as JSON in UTF-8, with the fields that were given to it."""
    return _encode(body.model_dump(exclude_unset=True)).decode().translate(_LINE_ENDS).encode()


def event(data: bytes) -> bytes:
    """One event of one line of data."""
    return b"data: " + data + b"\n\n"


def comment(text: str) -> bytes:
    """A comment, which clients ignore. The text is one line."""
    return f": {text}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """The end of a stream that failed: the error and nothing after it, so no client takes it for a right end."""
    return event(error.body())


class TextEvent:
    """An event that is always the same but for one text.

    Args:
        body: the event's document, with ``TextEvent.PLACE`` as the value of the text.
    """

    PLACE = _PLACE

    def __init__(self, body: BaseModel) -> None:
        before, _, after = event(document(body)).partition(_encode(_PLACE))
        self._before, self._after = before, after

    def with_text(self, text: str) -> bytes:
        """The event for this text."""
        return self._before + json_string(text) + self._after
