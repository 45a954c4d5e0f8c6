"""The text side of a GGUF file: its token list and merges as a tokenizer of the ``tokenizers`` library. No torch.

A GGUF file names its pre-tokenizer by one word; only those whose rules are known exactly are built, others are refused
by name. Control tokens become special added tokens, which the library matches in text before anything else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvferry_runtime.model.config import ModelConfig
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.gguf_file import GGUFFile
from kvferry_wire.pod import TextBundle

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# Words, numbers in pieces of up to three (llama 3) or one (qwen 2) digits, punctuation, line ends, spaces.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _words_then_bytes(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    ),
    "llama-bpe": lambda: _words_then_bytes(_LLAMA3_WORDS),
    "qwen2": lambda: _words_then_bytes(_QWEN2_WORDS),
}


def gguf_text(file: GGUFFile, config: ModelConfig) -> TextBundle:
    """The bundle of a GGUF file.

    Raises:
        ModelError: no tokenizer in the file, one of another kind, or one that does not fit the model.
    """
    data = file.metadata
    tokenizer = _tokenizer(file.path, data, config)
    tokens: list[str] = data["tokenizer.ggml.tokens"]
    bos_token = _token(tokens, config.bos_token_id)
    pre = data["tokenizer.ggml.pre"]
    add_bos = data.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    template = data.get("tokenizer.chat_template")
    return TextBundle(
        digest="",
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=template if isinstance(template, str) else None,
        bos_token=bos_token,
        eos_token=_token(tokens, config.eos_token_ids[0] if config.eos_token_ids else None),
        eos_token_ids=config.eos_token_ids,
        add_bos=bool(add_bos) and bos_token is not None,
        vocab_size=config.vocab_size,
        generation_defaults={},
    ).digested()


def _tokenizer(path: Path, data: dict[str, Any], config: ModelConfig) -> Any:
    tokens, merges = _texts(path, data, "tokenizer.ggml.tokens"), _texts(path, data, "tokenizer.ggml.merges")
    if data.get("tokenizer.ggml.model") != "gpt2":
        raise ModelError(f"{path}: tokenizer.ggml.model is {data.get('tokenizer.ggml.model')!r}; 'gpt2' is accepted")
    pre = data.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(f"{path}: tokenizer.ggml.pre is {pre!r}; accepted: {', '.join(_PRE_TOKENIZERS)}")
    if len(tokens) > config.vocab_size:
        raise ModelError(f"{path}: {len(tokens)} tokens, but the model has {config.vocab_size}")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.tokens: a token appears twice")
    pairs = [_pair(path, merge) for merge in merges]
    try:
        tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: the tokens and merges make no tokenizer: {error}") from error
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = data.get("tokenizer.ggml.token_type") or []
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        found = [token for token, given in zip(tokens, types, strict=False) if given == kind]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in found])
    return tokenizer


def _texts(path: Path, data: dict[str, Any], key: str) -> list[str]:
    value = data.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{path}: {key} is missing or empty; the model cannot be served without its tokenizer")
    return value


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right or " " in right:
        raise ModelError(f"{path}: tokenizer.ggml.merges holds {merge!r}; two tokens with a space between are accepted")
    return left, right


def _token(tokens: list[str], token_id: int | None) -> str | None:
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else None
