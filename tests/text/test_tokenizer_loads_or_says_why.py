"""The tokenizer: what it refuses at load, and what encoding means."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvferry_text.bundle import load_text
from kvferry_text.tokenizer import BundleError, TextTokenizer
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.text.builders import (
    byte_fallback_json,
    byte_level_json,
    default_tools,
    make_bundle,
    make_tools,
    metaspace_json,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer_json": b"{}"}, "does not load"),
        ({"tokenizer_json": b""}, "does not load"),
        ({"tokenizer_json": b"\xff"}, "does not load"),
        ({"tokenizer_json": byte_level_json()[:-100]}, "does not load"),
        ({"vocab_size": 100}, "the model only 0..99"),
        ({"eos_token_ids": (10**6,)}, "eos_token_ids holds 1000000"),
        ({"eos_token_ids": (-1,)}, "eos_token_ids holds -1"),
        ({"add_bos": True, "bos_token": "<nothing>"}, "<nothing>"),
        ({"add_bos": True, "bos_token": None}, "bos token"),
        ({"generation_defaults": {"temperature": "hot"}}, "temperature is 'hot'"),
        ({"generation_defaults": {"temperature": 3.0}}, "0 to 2"),
        ({"generation_defaults": {"top_p": 0}}, "top_p is 0"),
        ({"generation_defaults": {"top_k": True}}, "top_k is True"),
        ({"generation_defaults": {"temperature": float("nan")}}, "temperature is nan"),
    ],
)
def test_a_bundle_that_cannot_be_served_says_why(changes: dict[str, Any], reason: str) -> None:
    """Each fault of a bundle is one clear error at load."""
    bundle = make_bundle(**{key: value for key, value in changes.items() if key != "tokenizer_json"})
    if "tokenizer_json" in changes:
        bundle = type(bundle)(**{**{f: getattr(bundle, f) for f in bundle.__struct_fields__}, **changes})
    with pytest.raises(BundleError, match=reason):
        load_text(bundle, DEFAULT_LIMITS)


def test_a_model_may_know_more_ids_than_its_tokenizer() -> None:
    """Padded vocabularies are common: the ids beyond have no text, those beyond the model's are refused."""
    size = default_tools().bundle.vocab_size
    tokenizer = make_tools(vocab_size=size + 64).tokenizer
    assert tokenizer.detokenizer().push(size + 63) == ""
    with pytest.raises(ValueError, match="outside 0"):
        tokenizer.detokenizer().push(size + 64)
    with pytest.raises(ValueError, match="outside 0"):
        tokenizer.detokenizer().push(-1)


@pytest.mark.parametrize("family", [byte_level_json, byte_fallback_json, metaspace_json])
@pytest.mark.parametrize("text", ["Hello there", " two  spaces ", "", "你好 🎉\n\ttab", "a<|im_end|>b</s>"])
def test_encoding_is_the_library_s(family: Callable[[], bytes], text: str) -> None:
    """With specials, the ids are those of the library's plain encode call without its post-processor."""
    loaded = Tokenizer.from_str(family().decode())
    tokenizer = TextTokenizer(make_bundle(family(), eos_token_ids=(2,)))
    expected = loaded.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, special=True, add_bos=False) == expected
    assert tokenizer.encode_mixed([text]) == tokenizer.encode(text, special=False, add_bos=False)


def test_cutting_and_padding_of_the_file_are_not_applied() -> None:
    """A tokenizer file that asks to truncate or pad does not change a prompt."""
    loaded = Tokenizer.from_str(byte_level_json().decode())
    loaded.enable_truncation(max_length=4)
    loaded.enable_padding(length=64)
    tokenizer = TextTokenizer(make_bundle(loaded.to_str().encode()))
    text = "the quick brown fox " * 5
    assert tokenizer.decode(tokenizer.encode(text, special=True, add_bos=False)) == text


def test_bos_is_put_in_front_once() -> None:
    """A prompt that brings its bos token keeps one."""
    tokenizer = make_tools(add_bos=True).tokenizer
    ids = tokenizer.encode("Hi", special=True, add_bos=True)
    assert ids[0] == 1 and ids.count(1) == 1
    assert tokenizer.encode("<|im_start|>Hi", special=True, add_bos=True) == ids
    assert tokenizer.encode("Hi", special=True, add_bos=False) == ids[1:]
    assert default_tools().tokenizer.encode("Hi", special=True, add_bos=True) == ids[1:]


def test_given_ids_stand_between_texts() -> None:
    """`encode_mixed` equals encoding the joined text with specials, where the ids are its special tokens."""
    tokenizer = default_tools().tokenizer
    mixed = tokenizer.encode_mixed([1, "user\nhello", 2, "\n", 1, 1, "assistant", ""])
    joined = "<|im_start|>user\nhello<|im_end|>\n<|im_start|><|im_start|>assistant"
    assert mixed == tokenizer.encode(joined, special=True, add_bos=False)


def test_special_tokens_are_found_after_normalization_too() -> None:
    """Where the tokenizer's normalizer makes other strings special, those spans are found."""
    from tokenizers import AddedToken, models, normalizers, pre_tokenizers

    loaded = Tokenizer(models.WordLevel({"[unk]": 0, "hello": 1}, unk_token="[unk]"))
    loaded.normalizer = normalizers.Lowercase()
    loaded.pre_tokenizer = pre_tokenizers.Whitespace()
    loaded.add_special_tokens([AddedToken("[sep]", normalized=True)])
    tokenizer = TextTokenizer(make_bundle(loaded.to_str().encode(), eos_token_ids=()))
    assert tokenizer.normalizes_specials
    assert tokenizer.special_spans("hello [SEP] what") == [(6, 11, 2)]
    assert not default_tools().tokenizer.normalizes_specials


def test_a_tokenizer_is_shared_by_threads() -> None:
    """Concurrent encoding of both kinds gives the ids that one thread gets."""
    tokenizer = default_tools().tokenizer
    text = "The quick <|im_end|> brown fox " * 50
    expected = [tokenizer.encode(text, special=special, add_bos=False) for special in (True, False)]
    wrong: list[int] = []

    def work(special: bool) -> None:
        for _ in range(40):
            if tokenizer.encode(text, special=special, add_bos=False) != expected[0 if special else 1]:
                wrong.append(1)

    threads = [threading.Thread(target=work, args=(index % 2 == 0,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_encoding_a_long_text_lets_other_threads_run() -> None:
    """B175: while one thread encodes, another makes progress."""
    tokenizer = default_tools().tokenizer
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    tokenizer.encode("你好" * 100_000, special=True, add_bos=False)
    during = ticks - before
    done.set()
    thread.join()
    assert during >= 5


def test_the_repr_is_short() -> None:
    """No vocabulary in logs."""
    assert len(repr(default_tools().tokenizer)) < 100 and len(repr(default_tools())) < 100
    assert json.dumps(repr(default_tools().tokenizer))
