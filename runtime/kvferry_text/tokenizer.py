"""Text to token ids and back, over the `tokenizers` library; one object per model, shared by threads.

Text is encoded in one of two ways. *With specials*, a special token's string (``<|im_end|>``) becomes that token's id,
as a chat template's markup and a raw completion prompt need. *As text*, the same characters are ordinary text: what a
user writes into a chat message never becomes a control token. `encode_mixed` does both in one pass.

Encoding goes through the library's batch call, the only one that releases the interpreter lock: a long text in one
thread does not stop another thread's stream.
"""

import json
import os
import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvferry_text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from kvferry_text.special_strings import SpecialStrings
from kvferry_text.token_bytes import DecoderPlan, decoder_plan, token_table
from kvferry_wire.pod import TextBundle

# One text per call gains nothing from the library's thread pool, which also warns when the process forks after its use.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CONTEXT_IDS = 8  # of the prompt, that an answer which continues it is decoded behind


class BundleError(ValueError):
    """A text bundle that cannot be served: says which part and why."""


class TextTokenizer:
    """Encodes and decodes for one ``TextBundle``.

    Attributes:
        eos_token_ids: ids that end an answer.
        vocab_size: ids the model knows; every accepted id is below it.
        special_tokens: strings of the control tokens, with their ids.
        special_strings: finds those strings, and parts of them, in text.
        normalizes_specials: whether other strings than these become control tokens, by the tokenizer's normalizer.

    Raises:
        BundleError: on construction, when the tokenizer does not load or does not fit the model's vocabulary.
    """

    def __init__(self, bundle: TextBundle) -> None:
        self.eos_token_ids = bundle.eos_token_ids
        self.vocab_size = bundle.vocab_size
        self._with_specials = _load(bundle.tokenizer_json)
        self._as_text = _load(bundle.tokenizer_json)
        self._as_text.encode_special_tokens = True
        self._vocabulary: dict[str, int] = self._with_specials.get_vocab(with_added_tokens=True)
        self._check_vocabulary(bundle)
        self._bos_id = self._vocabulary[bundle.bos_token] if bundle.add_bos and bundle.bos_token else None
        added = self._with_specials.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self.special_strings = SpecialStrings(self.special_tokens)
        self._special_ids = frozenset(self.special_tokens.values())
        self._normalizer = self._with_specials.normalizer
        self.normalizes_specials = self._normalizer is not None and any(
            token.special and token.normalized for token in added.values()
        )
        # Matched also where specials are not: stands for an id between two texts. Random, so no text can hold it.
        self._border = f"\ue000{secrets.token_hex(16)}\ue000"
        self._as_text.add_tokens([AddedToken(self._border, special=False, normalized=False)])
        self._border_id: int = self._as_text.token_to_id(self._border)
        self._plan: DecoderPlan = decoder_plan(json.loads(bundle.tokenizer_json))

    def _check_vocabulary(self, bundle: TextBundle) -> None:
        largest = max(self._vocabulary.values(), default=-1)
        if largest >= bundle.vocab_size:
            raise BundleError(f"the tokenizer has token id {largest}, the model only 0..{bundle.vocab_size - 1}")
        for token_id in bundle.eos_token_ids:
            if not 0 <= token_id < bundle.vocab_size:
                raise BundleError(f"eos_token_ids holds {token_id}, the model has 0..{bundle.vocab_size - 1}")
        if bundle.add_bos and bundle.bos_token not in self._vocabulary:
            raise BundleError(f"prompts need a bos token, but {bundle.bos_token!r} is not in the vocabulary")

    # ---- encoding ------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: any Unicode text without lone surrogates.
            special: whether strings of special tokens become those tokens.
            add_bos: put the bundle's bos token in front, unless the bundle has none or the text brings it already.
        """
        ids = _encode(self._with_specials if special else self._as_text, text)
        if add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids

    def encode_mixed(self, parts: Sequence[str | int]) -> list[int]:
        """Token ids of texts (encoded as text) with given ids between them.

        The same ids as `encode` with specials gives for the joined text, where the given ids are its special tokens.
        """
        given = [part for part in parts if isinstance(part, int)]
        joined = "".join(self._border if isinstance(part, int) else part for part in parts)
        replacements = iter(given)
        ids = [next(replacements) if i == self._border_id else i for i in _encode(self._as_text, joined)]
        if next(replacements, None) is not None:
            raise RuntimeError("the tokenizer lost a border between texts")
        return ids

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Where special tokens stand in a text, in order: (start, end, token id), in characters.

        Whitespace that a token takes in with it belongs to its span.
        """
        encoding = self._with_specials.encode_batch([text], add_special_tokens=False)[0]
        spans = zip(encoding.offsets, encoding.ids, encoding.tokens, strict=True)
        # An unknown character may become the special unknown token: that is no string of a special token.
        return [
            (start, end, token_id)
            for (start, end), token_id, token in spans
            if token_id in self._special_ids and self._is_string_of(token, text[start:end])
        ]

    def _is_string_of(self, token: str, text: str) -> bool:
        if text.strip() == token.strip():
            return True
        normalize = self._normalizer.normalize_str if self.normalizes_specials else str
        return bool(normalize(text).strip() == normalize(token).strip())

    # ---- decoding ------------------------------------------------------------------------------------------------

    @cached_property
    def _table(self) -> tuple[bytes, ...]:
        return token_table(self._plan, self._vocabulary, self._special_ids, self.vocab_size)

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental decoder.

        Args:
            context: ids before the text. An answer that continues them keeps the space which tokenizers of the
                SentencePiece kind drop at the start of a text; without context the text starts anew.
        """
        before = [token_id for token_id in context[-CONTEXT_IDS:] if token_id not in self._special_ids]
        if self._plan.kind == "bytes":
            return ByteDetokenizer(self._table, strip_spaces=0 if before else self._plan.strip_spaces)
        return WindowDetokenizer(self.decode, self._special_ids, self.vocab_size, before)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out, as the `tokenizers` library decodes them in one go."""
        text: str = self._with_specials.decode(list(ids), skip_special_tokens=True)
        return text

    def __repr__(self) -> str:
        return f"TextTokenizer(vocab_size={self.vocab_size}, specials={len(self._special_ids)}, {self._plan.kind})"


def _load(tokenizer_json: bytes) -> Any:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # the library raises nothing more specific
        raise BundleError(f"the tokenizer does not load: {error}") from error
    # A tokenizer file may ask to cut or pad what it encodes; a prompt is served whole or refused.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
