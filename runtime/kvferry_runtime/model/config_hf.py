"""A Hugging Face ``config.json`` of the Llama architecture. What would change the maths in a way that the decoder does
not compute is refused by the field's name. No torch.
"""

from collections.abc import Mapping
from typing import Any

from kvferry_runtime.model.config import ModelConfig, RopeConfig, RopeType
from kvferry_runtime.model.config_fields import Fields
from kvferry_runtime.model.errors import ModelError, RemoteCodeError

_ARCHITECTURE = "LlamaForCausalLM"
_ROPE_TYPES: dict[str, RopeType] = {"default": "default", "linear": "linear", "llama3": "llama3"}
_DEFAULT_THETA = 10_000.0


def parse_hf_config(values: Mapping[str, Any], origin: str) -> ModelConfig:
    """Read a parsed ``config.json``.

    Args:
        origin: the file, for messages.

    Raises:
        ModelError: another architecture, or fields that are missing, absurd or not supported: all of them at once.
    """
    fields = Fields(origin, values)
    architectures = fields.get("architectures")
    if fields.get("auto_map") is not None:
        raise RemoteCodeError(f"{origin}: auto_map: the model brings its own code, which is never run")
    if architectures != [_ARCHITECTURE]:
        raise ModelError(f"{origin}: architectures is {architectures!r}; [{_ARCHITECTURE!r}] is accepted")
    fields.only("model_type", "llama")
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("quantization_config")
    fields.only("sliding_window")
    fields.only("pretraining_tp", 1)
    fields.only("partial_rotary_factor", 1.0, 1)
    vocab_size = fields.size("vocab_size")
    hidden_size = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        fields.fault("num_key_value_heads", f"a divisor of num_attention_heads ({heads}) is accepted")
    if fields.get("head_dim") is None and hidden_size % heads:
        fields.fault("head_dim", f"hidden_size ({hidden_size}) is no multiple of num_attention_heads ({heads})")
    head_dim = fields.size("head_dim", max(1, hidden_size // heads))
    if head_dim % 2:
        fields.fault("head_dim", f"an even number is accepted (it is {head_dim})")
    max_positions = fields.size("max_position_embeddings")
    bos = fields.token_ids("bos_token_id", vocab_size)
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=max_positions,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, max_positions, origin),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
    )
    fields.finish()
    return config


def _rope(fields: Fields, max_positions: int, origin: str) -> RopeConfig:
    """Either ``rope_parameters`` (which hold theta too), or ``rope_theta`` and ``rope_scaling``."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    given = fields.get(name)
    if given is not None and not isinstance(given, dict):
        fields.fault(name, "an object or null is accepted")
    values = given if isinstance(given, dict) else {}
    rope = Fields(f"{origin}: {name}", values)
    theta = rope.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        fields.fault(name, f"rope_type {kind!r} is not supported; accepted: {', '.join(_ROPE_TYPES)}")
        return RopeConfig(theta=theta)
    rope.only("partial_rotary_factor", 1.0, 1)
    result = RopeConfig(theta=theta)
    if kind == "linear":
        result = RopeConfig(theta=theta, type="linear", factor=rope.number("factor"))
    elif kind == "llama3":
        result = RopeConfig(
            theta=theta,
            type="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=rope.size("original_max_position_embeddings", max_positions),
        )
        if result.high_freq_factor <= result.low_freq_factor:
            rope.fault("high_freq_factor", f"a number above low_freq_factor ({result.low_freq_factor:g}) is accepted")
    rope.finish()
    return result
