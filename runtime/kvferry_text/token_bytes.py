"""What bytes each token id stands for, where a tokenizer's decoder can be read as such a table.

Two families can: byte-level BPE (decoder ``ByteLevel``: each character of a token stands for one byte) and BPE with
byte fallback (decoders ``Replace`` of the space mark, ``ByteFallback``, ``Fuse``, ``Strip``: a token is text, or
``<0x41>`` for one byte). Text is then the UTF-8 reading of the bytes, which needs constant work per token.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to decode with a tokenizer; ``kind`` is ``window`` where no table of bytes describes it."""

    kind: Literal["bytes", "window"]
    byte_level: bool = False  # characters of tokens stand for bytes
    replace: tuple[tuple[str, str], ...] = ()  # (old, new), applied to a token in this order
    byte_fallback: bool = False  # tokens <0x00>..<0xFF> are bytes
    strip_spaces: int = 0  # spaces dropped at the start of a text


def decoder_plan(tokenizer: Mapping[str, Any]) -> DecoderPlan:
    """Read the ``decoder`` of a tokenizer file."""
    steps = list(_flat(tokenizer.get("decoder")))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderPlan(kind="bytes", byte_level=True)
    if "ByteFallback" not in kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return DecoderPlan(kind="window")
    replace, strip = [], 0
    for position, step in enumerate(steps):
        if step["type"] == "Replace":
            old = step["pattern"].get("String")
            if old is None or position > kinds.index("ByteFallback"):
                return DecoderPlan(kind="window")
            replace.append((old, step["content"]))
        elif step["type"] == "Strip":
            # Before Fuse it would strip each token, and only Fuse makes one text of them.
            if step["content"] != " " or step["stop"] or "Fuse" not in kinds[:position]:
                return DecoderPlan(kind="window")
            strip += step["start"]
    return DecoderPlan(kind="bytes", replace=tuple(replace), byte_fallback=True, strip_spaces=strip)


def _flat(decoder: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _flat(inner)
    else:
        yield decoder


def token_table(
    plan: DecoderPlan, vocabulary: Mapping[str, int], special_ids: frozenset[int], size: int
) -> tuple[bytes, ...]:
    """Bytes of each id below ``size``: none for special tokens and for ids that the tokenizer does not know."""
    table = [b""] * size
    for token, token_id in vocabulary.items():
        if token_id not in special_ids:
            table[token_id] = _token_bytes(plan, token)
    return tuple(table)


def _token_bytes(plan: DecoderPlan, token: str) -> bytes:
    if plan.byte_level:
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token with characters that stand for no byte is plain text
            return token.encode()
    for old, new in plan.replace:
        token = token.replace(old, new)
    match = _BYTE_TOKEN.fullmatch(token) if plan.byte_fallback else None
    return bytes.fromhex(match[1]) if match else token.encode()


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others, in order, for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, shift = {}, 0
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(0x100 + shift)] = byte
            shift += 1
    return alphabet


BYTE_OF_CHARACTER = _byte_characters()
