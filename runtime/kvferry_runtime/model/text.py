"""A model's text side as a ``TextBundle``: tokenizer, chat template, special tokens, generation defaults. No torch."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.folder import CONFIG_FILE, TOKENIZER_FILE, ModelFolder, read_json
from kvferry_runtime.model.small_files import read_small
from kvferry_runtime.model.text_gguf import gguf_text
from kvferry_runtime.model.text_toy import toy_text
from kvferry_wire.limits import DEFAULT_LIMITS
from kvferry_wire.pod import TextBundle

_TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_JSON = "chat_template.json"
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")


def load_text_bundle(folder: ModelFolder) -> TextBundle:
    """The bundle of a model.

    Raises:
        ModelError: the tokenizer lacks, does not load, does not fit the model, or is of a kind that is not supported.
    """
    if folder.toy is not None:
        return toy_text(folder.toy)
    if folder.gguf is not None:
        return gguf_text(folder.gguf, folder.config)
    return _folder_text(folder)


def _folder_text(folder: ModelFolder) -> TextBundle:
    path = folder.path / TOKENIZER_FILE
    if not path.is_file():
        raise ModelError(
            f"{folder.path}: {TOKENIZER_FILE} is missing; the model cannot be served without its tokenizer"
        )
    raw = read_small(path, DEFAULT_LIMITS.text_bundle_bytes)
    try:
        tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: the tokenizer does not load: {error}") from error
    config = _optional_json(folder.path / _TOKENIZER_CONFIG)
    generation = _optional_json(folder.path / _GENERATION_CONFIG)
    bos_token, eos_token = (_token_text(config.get(name)) for name in ("bos_token", "eos_token"))
    bundle = TextBundle(
        digest="",
        tokenizer_json=raw,
        chat_template=_chat_template(folder.path, config),
        bos_token=bos_token,
        eos_token=eos_token,
        eos_token_ids=_eos_ids(folder, generation, tokenizer, eos_token),
        add_bos=_adds_bos(path, tokenizer, config, bos_token),
        vocab_size=folder.config.vocab_size,
        generation_defaults={name: generation[name] for name in _DEFAULTS if generation.get(name) is not None},
    )
    _check(bundle, tokenizer, path)
    return bundle.digested()


def _check(bundle: TextBundle, tokenizer: Any, path: Path) -> None:
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= bundle.vocab_size:
        raise ModelError(f"{path}: token id {largest}, but {CONFIG_FILE} says vocab_size {bundle.vocab_size}")
    for name, token in (("bos_token", bundle.bos_token), ("eos_token", bundle.eos_token)):
        if token is not None and tokenizer.token_to_id(token) is None:
            raise ModelError(f"{path}: {name} {token!r} of {_TOKENIZER_CONFIG} is not in the vocabulary")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json: its text, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """A file of its own goes first, as in transformers; of several named templates, ``default``."""
    if (folder / _TEMPLATE_FILE).is_file():
        try:
            return read_small(folder / _TEMPLATE_FILE, DEFAULT_LIMITS.text_bundle_bytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{folder / _TEMPLATE_FILE}: not UTF-8: {error}") from error
    given = config.get("chat_template") or _optional_json(folder / _TEMPLATE_JSON).get("chat_template")
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    if given is not None and not isinstance(given, str):
        raise ModelError(f"{folder / _TOKENIZER_CONFIG}: chat_template: a text, or a list with one named 'default'")
    return given


def _eos_ids(folder: ModelFolder, generation: dict[str, Any], tokenizer: Any, eos_token: str | None) -> tuple[int, ...]:
    """The union of what config, generation config and tokenizer call the end."""
    ids = list(folder.config.eos_token_ids)
    given = generation.get("eos_token_id")
    for token in given if isinstance(given, list) else [] if given is None else [given]:
        if type(token) is not int or not 0 <= token < folder.config.vocab_size:
            raise ModelError(
                f"{folder.path / _GENERATION_CONFIG}: eos_token_id {token!r}, not in 0..{folder.config.vocab_size - 1}"
            )
        ids.append(token)
    of_tokenizer = tokenizer.token_to_id(eos_token) if eos_token is not None else None
    if of_tokenizer is not None:
        ids.append(of_tokenizer)
    return tuple(dict.fromkeys(ids))


def _adds_bos(path: Path, tokenizer: Any, config: dict[str, Any], bos_token: str | None) -> bool:
    """Whether the tokenizer puts bos before a text: what its post-processor does, unless its config says otherwise."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    full: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    bos = tokenizer.token_to_id(bos_token) if bos_token is not None else None
    if full not in (bare, [bos, *bare]):
        raise ModelError(f"{path}: the post-processor adds more than bos to a text, which is not supported")
    flag = config.get("add_bos_token")
    if isinstance(flag, bool) and str(config.get("tokenizer_class", "")).startswith("Llama"):
        return flag and bos is not None
    return full != bare
