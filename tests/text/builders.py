"""Small tokenizers of each family, bundles around them, and requests and legs for tests."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvferry_text.bundle import TextTools, load_text
from kvferry_text.openai.parameters import Kind
from kvferry_text.prepare import PreparedRequest, prepare
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.leg import AnswerFormat, ChoiceState, Leg, Sampling
from kvferry_wire.limits import DEFAULT_LIMITS, Limits
from kvferry_wire.pod import TextBundle

MODEL = "toy-model"
CONTEXT = 512
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "Hello there\nHello there friend there\nHello there and there\nHello\nthere",  # each of these words is one token
    "The quick brown fox jumps over the lazy dog. Hello there, how are you today? I am fine, thank you very much.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3",
    "Grüße aus Köln, 你好世界, こんにちは, Привет 🎉🚀 naïve café",
    "user assistant system im_start im_end <tag> </tag> <|x|>",
] * 4


@cache
def byte_level_json(vocab_size: int = 800) -> bytes:
    """A byte-level BPE tokenizer trained on a few lines; its first ids are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return tokenizer.to_str().encode()


@cache
def byte_fallback_json() -> bytes:
    """A tokenizer of Llama 2's kind: space marks, byte fallback, a space put before each text and dropped after."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *(chr(code) for code in range(0x21, 0x7F)), "é"]:
        vocab[token] = len(vocab)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("l", "l"), ("e", "ll"), ("h", "ell"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.to_str().encode()


@cache
def metaspace_json() -> bytes:
    """A tokenizer whose decoder no table of bytes describes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str().encode()


def make_bundle(tokenizer_json: bytes | None = None, **changes: Any) -> TextBundle:
    """A bundle around the byte-level tokenizer, with ChatML."""
    encoded = tokenizer_json if tokenizer_json is not None else byte_level_json()
    size = Tokenizer.from_str(encoded.decode()).get_vocab_size()
    fields: dict[str, Any] = {
        "digest": "0" * 64,
        "tokenizer_json": encoded,
        "chat_template": CHATML,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "eos_token_ids": (2,),
        "add_bos": False,
        "vocab_size": size,
        "generation_defaults": {},
    }
    return TextBundle(**{**fields, **changes})


def make_tools(tokenizer_json: bytes | None = None, **changes: Any) -> TextTools:
    return load_text(make_bundle(tokenizer_json, **changes), DEFAULT_LIMITS)


@cache
def default_tools() -> TextTools:
    """Tools of the default bundle, made once."""
    return make_tools()


def make_body(kind: Kind, **changes: Any) -> dict[str, Any]:
    """A right request body; a change to ``...`` leaves the field out."""
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hello there"}]} if kind == "chat" else {"prompt": "Hello there"}
    )
    fields = {"model": MODEL, **prompt, **changes}
    return {name: value for name, value in fields.items() if value is not ...}


def prepare_bytes(
    kind: Kind,
    body: bytes,
    tools: TextTools | None = None,
    limits: Limits = DEFAULT_LIMITS,
    contexts: tuple[int, ...] = (CONTEXT,),
) -> PreparedRequest:
    used = tools if tools is not None else default_tools()
    return prepare(kind, body, used.bundle, used.tokenizer, used.template, limits, (MODEL,), contexts)


def prepare_body(
    kind: Kind,
    tools: TextTools | None = None,
    limits: Limits = DEFAULT_LIMITS,
    contexts: tuple[int, ...] = (CONTEXT,),
    /,
    **changes: Any,
) -> PreparedRequest:
    return prepare_bytes(kind, json.dumps(make_body(kind, **changes)).encode(), tools, limits, contexts)


def make_leg(
    *,
    kind: Kind = "chat",
    stream: bool = True,
    include_usage: bool = False,
    role_sent: bool = False,
    choices: tuple[ChoiceState, ...] = (ChoiceState(),),
    prompt_ids: tuple[int, ...] = (1, 10, 11),
    **sampling: Any,
) -> Leg:
    return Leg(
        internal_id="leg",
        attempt=0,
        request_id="request",
        deadline_ms=10_000,
        prompt_ids=prompt_ids,
        choices=choices,
        sampling=Sampling(**{"seed": 1, "max_tokens": 400, **sampling}),
        format=AnswerFormat(
            kind=kind,
            stream=stream,
            include_usage=include_usage,
            response_id="chatcmpl-1" if kind == "chat" else "cmpl-1",
            created=1_700_000_000,
            model=MODEL,
            role_sent=role_sent,
        ),
        extras=KeyExtras(),
    )


def events(data: bytes) -> list[Any]:
    """The documents of a stream; ``[DONE]`` as a string. Fails on anything that is no whole event."""
    assert data.endswith(b"\n\n")
    found = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(": "):
            continue
        assert block.startswith("data: ") and "\n" not in block
        found.append("[DONE]" if block == "data: [DONE]" else json.loads(block.removeprefix("data: ")))
    return found


def stream_text(data: bytes, choice: int = 0) -> str:
    """The joined text of one choice of a stream."""
    pieces = []
    for document in events(data):
        for entry in [] if document == "[DONE]" else document["choices"]:
            if entry["index"] == choice:
                pieces.append(entry["text"] if "text" in entry else entry["delta"].get("content", ""))
    return "".join(pieces)
