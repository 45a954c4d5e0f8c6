"""Token ids to text, one id at a time.

`push` returns the text that an id completes: nothing while a character's bytes are still incomplete, so a delta never
cuts a character. `flush` returns what is left at the end, U+FFFD for bytes that are no character. Special tokens have
no text. Work per id does not grow with the text before it.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"

# No character needs more ids than this: a longer run of undecodable ids is invalid and is let go.
_LONGEST_CHARACTER_IDS = 8


class Detokenizer(Protocol):
    """Decodes one choice of one answer; not for sharing."""

    def push(self, token_id: int) -> str:
        """The text completed by this id. Raises ``ValueError`` for an id outside the vocabulary."""
        ...

    def flush(self) -> str:
        """The text still held, at the end; nothing is held after it."""
        ...


class ByteDetokenizer:
    """Reads ids as bytes, and bytes as UTF-8.

    Equal to the library's decoding of all ids for byte-level tokenizers. With byte fallback it is equal wherever the
    bytes are valid; of an invalid run, the library turns all bytes into U+FFFD and this only the invalid ones.

    Args:
        table: bytes of each id.
        strip_spaces: spaces to drop at the start of the text.
    """

    def __init__(self, table: Sequence[bytes], *, strip_spaces: int = 0) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip_spaces = strip_spaces

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._table):
            raise ValueError(f"token id {token_id} is outside 0..{len(self._table) - 1}")
        text = self._decode(self._table[token_id])
        return self._stripped(text) if self._strip_spaces and text else text

    def flush(self) -> str:
        return self._decode(b"", True)

    def _stripped(self, text: str) -> str:
        kept = text.lstrip(" ")
        dropped = min(len(text) - len(kept), self._strip_spaces)
        self._strip_spaces = 0 if kept else self._strip_spaces - dropped
        return text[dropped:]


class WindowDetokenizer:
    """For decoders that no table describes: decodes a window of the last ids with and without the newest ones.

    The window starts at ids whose text has been given out, so that what a decoder does at the start of a text (drop a
    space, say) happens to both readings alike and the difference is the new text.

    Args:
        decode: ids to text in one go.
        special_ids: ids without text.
        vocab_size: ids below it are accepted.
        context: ids before the text, special ones left out.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        special_ids: frozenset[int],
        vocab_size: int,
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._special_ids = special_ids
        self._vocab_size = vocab_size
        self._window = list(context)
        self._read = len(self._window)  # ids of the window whose text has been given out
        self._given = decode(self._window) if self._window else ""  # the text of those

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"token id {token_id} is outside 0..{self._vocab_size - 1}")
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._read < _LONGEST_CHARACTER_IDS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        if self._read == len(self._window):
            return ""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._given) :]
        del self._window[: self._read]
        self._read = len(self._window)
        self._given = self._decode(self._window)
        return new
