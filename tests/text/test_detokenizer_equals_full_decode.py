"""Incremental decoding gives, piece by piece, what decoding all ids at once gives."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry_text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from kvferry_text.tokenizer import TextTokenizer
from tests.text.builders import byte_fallback_json, byte_level_json, default_tools, make_bundle, metaspace_json

TEXTS = [
    "",
    "Hello there",
    "  leading and  double  spaces ",
    "emoji 🎉🚀👩‍👩‍👧‍👦 flags 🇩🇪",
    "你好，世界。こんにちは 안녕하세요",
    "combining e\u0301 n\u0303, Grüße, \u202ertl",
    "line\nbreaks\r\n\ttabs\x00\x1f",
    "\ufffd a real replacement character \ufffd",
    "<tool call> x <|im_end|> y",
]


def loaded(family: Callable[[], bytes]) -> TextTokenizer:
    return TextTokenizer(make_bundle(family(), eos_token_ids=(2,)))


def decoded(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])


@pytest.mark.parametrize("family", [byte_level_json, byte_fallback_json, metaspace_json])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(family: Callable[[], bytes], text: str) -> None:
    """Pieces joined equal the library's decoding of all ids, for each family of tokenizers."""
    tokenizer = loaded(family)
    ids = tokenizer.encode(text, special=True, add_bos=False)
    assert decoded(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)


def test_each_family_has_its_decoder() -> None:
    """Tables of bytes where the decoder allows it, a window elsewhere."""
    assert isinstance(loaded(byte_level_json).detokenizer(), ByteDetokenizer)
    assert isinstance(loaded(byte_fallback_json).detokenizer(), ByteDetokenizer)
    assert isinstance(loaded(metaspace_json).detokenizer(), WindowDetokenizer)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, default_tools().bundle.vocab_size - 1), max_size=40))
@example([0, 1, 2])
def test_any_ids_decode_as_the_library_does(ids: list[int]) -> None:
    """Byte-level: also for ids in no sensible order, whose bytes are no valid UTF-8."""
    tokenizer = default_tools().tokenizer
    assert decoded(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
@pytest.mark.parametrize("family", [byte_fallback_json, metaspace_json])
def test_any_text_decodes_as_the_library_does(family: Callable[[], bytes], text: str) -> None:
    """The other families, for ids that come from text."""
    tokenizer = loaded(family)
    ids = tokenizer.encode(text, special=True, add_bos=False)
    assert decoded(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)


def byte_ids(data: bytes) -> list[int]:
    """Single-byte tokens of the byte-fallback tokenizer."""
    return [3 + byte for byte in data]


def test_no_piece_holds_half_a_character() -> None:
    """The bytes of a character come out together, with the last of them."""
    detokenizer = loaded(byte_fallback_json).detokenizer()
    assert [detokenizer.push(token_id) for token_id in byte_ids("🎉é".encode())] == ["", "", "", "🎉", "", "é"]
    assert detokenizer.flush() == ""


def test_only_invalid_bytes_are_replaced() -> None:
    """U+FFFD stands where bytes are no character, and at the end for one that was never completed."""
    detokenizer = loaded(byte_fallback_json).detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in byte_ids(b"\xff" + "é".encode() + b"\xf0\x9f" + b"a\xe4\xbd")]
    assert "".join(pieces) == "\ufffdé\ufffda"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_have_no_text() -> None:
    """Control tokens inside an answer are skipped, and do not break a character in two."""
    tokenizer = default_tools().tokenizer
    ids = tokenizer.encode("a<|im_end|>b<|endoftext|>", special=True, add_bos=False)
    assert decoded(tokenizer.detokenizer(), ids) == "ab"
    word = tokenizer.encode("🐙", special=False, add_bos=False)
    assert len(word) > 1
    split = [word[0], 2, *word[1:]]
    assert decoded(tokenizer.detokenizer(), split) == tokenizer.decode(split) == "🐙"


def test_a_text_of_its_own_drops_the_leading_space_and_a_continuation_keeps_it() -> None:
    """SentencePiece-like tokenizers: a chat answer starts clean, a completion goes on behind its prompt."""
    for family in (byte_fallback_json, metaspace_json):
        tokenizer = loaded(family)
        prompt = tokenizer.encode("say", special=True, add_bos=False)
        both = tokenizer.encode("say the", special=True, add_bos=False)
        answer = both[len(prompt) :]
        assert decoded(tokenizer.detokenizer(), answer) == "the"
        assert decoded(tokenizer.detokenizer(prompt), answer) == " the"
    bos_only = loaded(byte_fallback_json)
    assert decoded(bos_only.detokenizer([1]), bos_only.encode("the", special=True, add_bos=False)) == "the"


def test_a_window_lets_an_endless_invalid_run_go() -> None:
    """A decoder that ends in U+FFFD for ever does not hold text for ever, and the window stays small."""

    class Counting:
        def __init__(self) -> None:
            self.longest = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return "\ufffd" * len(ids)

    counting = Counting()
    detokenizer = WindowDetokenizer(counting.decode, frozenset(), 10)
    given_out = "".join(detokenizer.push(5) for _ in range(1000))
    assert len(given_out) > 980 and len(given_out + detokenizer.flush()) == 1000
    assert counting.longest <= 20


def test_work_per_id_does_not_grow() -> None:
    """The window holds a handful of ids however long the answer is."""
    tokenizer = loaded(metaspace_json)
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return tokenizer.decode(ids)

    detokenizer = WindowDetokenizer(decode, frozenset(), tokenizer.vocab_size)
    for token_id in tokenizer.encode("The quick brown fox " * 200, special=True, add_bos=False):
        detokenizer.push(token_id)
    assert max(lengths) <= 4
