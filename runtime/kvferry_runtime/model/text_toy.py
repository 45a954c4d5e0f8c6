"""The toy model's text side: one id per byte, then bos, eos and words that no text encodes to. No torch."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kvferry_runtime.model.toy_spec import BOS_TOKEN, BYTE_TOKENS, EOS_TOKEN, ToySpec
from kvferry_wire.pod import TextBundle

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level tokens (the rule of GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    stand_in = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


def toy_text(spec: ToySpec) -> TextBundle:
    """The bundle of a toy model."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    vocab |= {BOS_TOKEN: spec.bos_token_id, EOS_TOKEN: spec.eos_token_id}
    vocab |= {f"Ġw{token_id}": token_id for token_id in range(BYTE_TOKENS + 2, spec.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    # A character is a word: the tokenizer remembers 10,000 words, which would be as many whole prompts.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("(?m)."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (BOS_TOKEN, EOS_TOKEN)]
    )
    return TextBundle(
        digest="",
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=_TEMPLATE,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        eos_token_ids=(spec.eos_token_id,),
        add_bos=False,
        vocab_size=spec.vocab,
        generation_defaults={},
    ).digested()
