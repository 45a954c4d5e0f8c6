"""A config that would need other maths than ours is refused by field, value and what is accepted."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry_runtime.model.config_gguf import parse_gguf_config
from kvferry_runtime.model.config_hf import parse_hf_config
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.folder import open_folder
from kvferry_runtime.model.gguf_file import GGUFFile
from kvferry_runtime.model.loader import choose_dtype
from tests.support.checkpoints import TinyLlama, make_checkpoint

BASE = TinyLlama().config()


def parse(**changes: Any) -> Any:
    values = {**BASE, **changes}
    return parse_hf_config({key: value for key, value in values.items() if value != "absent"}, "config.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            r"architectures is \['MistralForCausalLM'\]; \['LlamaForCausalLM'\]",
        ),
        ({"architectures": "absent"}, "architectures is None"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map: .*never run"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*awq"),
        ({"attention_bias": True}, "attention_bias is True; accepted: False"),
        ({"attention_bias": 0}, "attention_bias is 0; accepted: False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: 'silu'"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type 'yarn' is not supported; accepted: default",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"vocab_size": "absent"}, "vocab_size is missing; an integer from 1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"hidden_size": "42"}, "hidden_size is '42'"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads is 4; a divisor of num_attention_heads \(6\)"),
        ({"head_dim": 9}, "head_dim is 9; an even number"),
        ({"head_dim": None, "hidden_size": 41}, "head_dim is None; hidden_size"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; true or false"),
        ({"eos_token_id": [2, 999]}, r"eos_token_id is \[2, 999\]; ids of 0..262"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
    ],
)
def test_a_hugging_face_config_is_refused_by_its_field(changes: dict[str, Any], said: str) -> None:
    """What is given and what is accepted stand in the message."""
    with pytest.raises(ModelError, match=said):
        parse(**changes)


def test_all_faults_come_at_once() -> None:
    """Nobody has to fix a config field by field."""
    with pytest.raises(ModelError) as caught:
        parse(vocab_size=0, hidden_act="relu", mlp_bias=True)
    assert all(name in str(caught.value) for name in ("vocab_size", "hidden_act", "mlp_bias", "config.json"))


def test_older_spellings_mean_the_same() -> None:
    """``rope_theta`` and ``rope_scaling`` are what ``rope_parameters`` hold now; absent fields have their defaults."""
    new = parse(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0})
    old = parse(rope_parameters=None, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert new == old
    assert parse(num_key_value_heads="absent").kv_heads == 6
    assert parse(hidden_size=48, head_dim="absent").head_dim == 8
    assert parse(tie_word_embeddings="absent").tied_embeddings is False
    assert parse(rope_parameters=None).rope.theta == 10_000.0
    assert parse(eos_token_id=[5, 6]).eos_token_ids == (5, 6)


def test_broken_json_is_refused_by_file(tmp_path: Path) -> None:
    """Cut, not an object, or huge."""
    path = make_checkpoint(tmp_path)
    for content in ("{", "[]", "[" * 100_000, json.dumps({"a": "x" * 5_000_000})):
        (path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=r"config\.json: "):
            open_folder(path)


GGUF_BASE = {
    "general.architecture": "llama",
    "llama.vocab_size": 263,
    "llama.embedding_length": 42,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 3,
    "llama.attention.key_length": 10,
    "llama.feed_forward_length": 52,
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 5,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2'; 'llama'"),
        ({"general.architecture": None}, "general.architecture is None"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"split.count": 3}, "split.count is 3"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.dimension_count": 6}, "llama.rope.dimension_count is 6; accepted: 10"),
        ({"llama.attention.value_length": 12}, "llama.attention.value_length is 12"),
        ({"llama.block_count": None}, "llama.block_count is"),
        ({"llama.attention.head_count": [6, 6]}, "llama.attention.head_count is"),
        ({"llama.attention.head_count_kv": 5}, "a divisor of the head count"),
        ({"tokenizer.ggml.eos_token_id": 263}, "tokenizer.ggml.eos_token_id is 263"),
    ],
)
def test_gguf_metadata_is_refused_by_its_key(changes: dict[str, Any], said: str) -> None:
    """As for a config.json."""
    file = GGUFFile(path=Path("x.gguf"), metadata={**GGUF_BASE, **changes}, tensors={}, header_bytes=0)
    with pytest.raises(ModelError, match=said):
        parse_gguf_config(file)


def test_end_of_turn_ends_an_answer_too() -> None:
    """A GGUF chat model may have an end-of-turn token besides end of sequence."""
    metadata = {**GGUF_BASE, "tokenizer.ggml.eot_token_id": 7}
    file = GGUFFile(path=Path("x.gguf"), metadata=metadata, tensors={}, header_bytes=0)
    assert parse_gguf_config(file).eos_token_ids == (5, 7)


def test_the_dtype_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 is chosen only where the CPU computes it fast; an unknown dtype is refused."""
    monkeypatch.setattr("kvferry_runtime.model.loader.cpu_flags", lambda: frozenset({"avx2", "avx512_bf16"}))
    assert choose_dtype("auto") == ("bfloat16", "dtype bfloat16: this CPU has avx512_bf16")
    monkeypatch.setattr("kvferry_runtime.model.loader.cpu_flags", lambda: frozenset({"avx2"}))
    assert choose_dtype("auto")[0] == "float32"
    assert choose_dtype("bfloat16")[0] == "bfloat16"
    with pytest.raises(ModelError, match="dtype: 'float16' given; accepted: auto, float32, bfloat16"):
        choose_dtype("float16")
