"""Tiny Llama checkpoints with random weights, written to disk as a user would find them. No transformers needed."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from kvferry_runtime.model.text_toy import byte_characters

SPECIALS = ("<|end|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """The shape of a tiny checkpoint; the defaults are odd on purpose."""

    name: str = "odd"
    vocab: int = 263
    hidden: int = 42
    inner: int = 52
    layers: int = 2
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 10  # not hidden / heads
    tied: bool = True
    positions: int = 2048
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0})
    seed: int = 7

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.tied,
            "rope_parameters": self.rope,
            "dtype": "float32",
            "bos_token_id": self.vocab - 2,
            "eos_token_id": self.vocab - 1,
        }

    def weights(self) -> dict[str, Tensor]:
        """Random weights under Hugging Face names, the same for the same shape and seed."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random) * (0.6 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1)

        q_out, kv_out = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = {"model.embed_tokens.weight": normal(self.vocab, self.hidden) * 8}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            weights[prefix + "input_layernorm.weight"] = 1 + normal(self.hidden)
            weights[prefix + "self_attn.q_proj.weight"] = normal(q_out, self.hidden) * 4
            weights[prefix + "self_attn.k_proj.weight"] = normal(kv_out, self.hidden) * 4
            weights[prefix + "self_attn.v_proj.weight"] = normal(kv_out, self.hidden)
            weights[prefix + "self_attn.o_proj.weight"] = normal(self.hidden, q_out) * 2
            weights[prefix + "post_attention_layernorm.weight"] = 1 + normal(self.hidden)
            weights[prefix + "mlp.gate_proj.weight"] = normal(self.inner, self.hidden)
            weights[prefix + "mlp.up_proj.weight"] = normal(self.inner, self.hidden)
            weights[prefix + "mlp.down_proj.weight"] = normal(self.hidden, self.inner)
        weights["model.norm.weight"] = 1 + normal(self.hidden)
        if not self.tied:
            weights["lm_head.weight"] = normal(self.vocab, self.hidden) * 4
        return weights


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TINY_LLAMAS = (
    TinyLlama(),
    TinyLlama(name="untied-one-kv-head", vocab=251, hidden=39, heads=3, kv_heads=1, head_dim=8, tied=False, layers=3),
    TinyLlama(
        name="no-grouping-linear-rope", heads=2, kv_heads=2, head_dim=6, rope={"rope_type": "linear", "factor": 3.0}
    ),
    TinyLlama(name="llama3-rope", vocab=301, hidden=36, heads=4, kv_heads=2, head_dim=16, rope=LLAMA3_ROPE),
)


def tiny_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level tokenizer: up to 256 bytes, one merge, words that no text reaches, specials at the end."""
    count = min(256, vocab - len(SPECIALS) - 1)
    words = [f"Ġw{index}" for index in range(count + 1, vocab - len(SPECIALS))]
    tokens = [*byte_characters()[:count], "he", *words, *SPECIALS]
    tokenizer = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def make_checkpoint(folder: Path, spec: TinyLlama = TINY_LLAMAS[0], *, shards: int = 1) -> Path:
    """Write a checkpoint folder; with more than one shard, an index too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec.config()))
    (folder / "tokenizer.json").write_text(tiny_tokenizer(spec.vocab).to_str())
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": spec.vocab - 1, "temperature": 0.7}))
    weights = spec.weights()
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    names = list(weights)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest]}.weight"
    return f"{_GGUF_NAMES[stem]}.weight"


def make_gguf(path: Path, spec: TinyLlama = TINY_LLAMAS[0], *, keys: dict[str, Any] | None = None) -> Path:
    """Write the checkpoint as llama.cpp's converter would, float32; ``keys`` overrides text metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(spec.vocab)
    writer.add_context_length(spec.positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.inner)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(1e-5)
    text = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"} | (keys or {})
    for key, value in text.items():
        writer.add_string(key, value)
    vocabulary = tiny_tokenizer(spec.vocab).get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(spec.vocab - 2)
    writer.add_eos_token_id(spec.vocab - 1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in spec.weights().items():
        heads = spec.heads if "q_proj" in name else spec.kv_heads if "k_proj" in name else 0
        if heads:  # as convert_hf_to_gguf.py permutes for llama.cpp's interleaved rotation
            halves = weight.reshape(heads, 2, spec.head_dim // 2, -1)
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(gguf_name(name), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
