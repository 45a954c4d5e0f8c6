"""The config of a GGUF file of the ``llama`` architecture. No torch."""

from kvferry_runtime.model.config import ModelConfig, RopeConfig
from kvferry_runtime.model.config_fields import Fields
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.gguf_file import GGUFFile

_ARCHITECTURE = "llama"
_DEFAULT_THETA = 10_000.0


def parse_gguf_config(file: GGUFFile) -> ModelConfig:
    """Read a file's metadata.

    Raises:
        ModelError: another architecture, or keys that are missing, absurd or not supported: all of them at once.
    """
    origin = str(file.path)
    fields = Fields(origin, file.metadata)
    architecture = fields.get("general.architecture")
    if architecture != _ARCHITECTURE:
        raise ModelError(f"{origin}: general.architecture is {architecture!r}; {_ARCHITECTURE!r} is accepted")
    fields.only("general.type", "model")
    fields.only("split.count", 1)
    fields.only("llama.expert_count", 0)
    vocab_size = _vocab_size(fields, file)
    hidden_size = fields.size("llama.embedding_length")
    heads = fields.size("llama.attention.head_count")
    kv_heads = fields.size("llama.attention.head_count_kv", heads)
    if heads % kv_heads:
        fields.fault("llama.attention.head_count_kv", f"a divisor of the head count ({heads}) is accepted")
    head_dim = fields.size("llama.attention.key_length", max(1, hidden_size // heads))
    fields.only("llama.attention.value_length", head_dim)
    fields.only("llama.rope.dimension_count", head_dim)
    if head_dim % 2:
        fields.fault("llama.attention.key_length", f"an even number is accepted (it is {head_dim})")
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.size("llama.feed_forward_length"),
        layers=fields.size("llama.block_count"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=fields.size("llama.context_length"),
        norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope=_rope(fields),
        tied_embeddings="output.weight" not in file.tensors,
        dtype="quantized",
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id", vocab_size)), None),
        eos_token_ids=_eos(fields, vocab_size),
    )
    fields.finish()
    return config


def _vocab_size(fields: Fields, file: GGUFFile) -> int:
    """The key if given, else the rows of the embedding."""
    embedding = file.tensors.get("token_embd.weight")
    return fields.size("llama.vocab_size", embedding.shape[0] if embedding is not None else None)


def _eos(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """End of sequence, and end of turn where a chat model has another token for it."""
    ids: list[int] = []
    for name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        ids += [token for token in fields.token_ids(name, vocab_size) if token not in ids]
    return tuple(ids)


def _rope(fields: Fields) -> RopeConfig:
    """Linear scaling is a key; llama3 scaling comes as a tensor of factors (``WeightSource.rope_factors``)."""
    theta = fields.number("llama.rope.freq_base", _DEFAULT_THETA)
    kind = fields.get("llama.rope.scaling.type")
    fields.only("llama.rope.scaling.type", "none", "linear")
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=fields.number("llama.rope.scaling.factor"))
    fields.only("llama.rope.scaling.factor", 0.0, 1.0)
    fields.only("llama.rope.scale_linear", 0.0, 1.0)
    return RopeConfig(theta=theta)
