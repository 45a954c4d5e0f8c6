"""From an ``EngineConfig`` to an engine that computes: model, KV memory, core and runner. Needs torch."""

import secrets
import time
from dataclasses import dataclass

import torch

from kvferry_runtime.attention.backend import reasons as attention_reasons
from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.engine.messages import EngineConfig, Ready
from kvferry_runtime.engine.sizing import KVSize, available_memory, size_kv
from kvferry_runtime.exec.budget import default_token_budget
from kvferry_runtime.exec.kv_memory import TORCH_DTYPES, KVMemory
from kvferry_runtime.exec.runner import ModelRunner
from kvferry_runtime.model.loader import LoadedModel, load_model
from kvferry_wire import PROTOCOL_VERSION
from kvferry_wire.hashing import CompatFields

EPOCH = 1
_INCARNATION_BYTES = 16


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What the loop turns, and what ``Ready`` will say (ports and back ends of the transfer are added later)."""

    core: EngineCore
    runner: ModelRunner
    memory: KVMemory
    ready: Ready
    compat: CompatFields  # what its hash is of


def build_engine(config: EngineConfig) -> BuiltEngine:
    """Load the model, size and allocate the KV memory, make core and runner.

    Raises:
        ModelError: the model cannot be used.
        ValueError: a size does not fit; the message names the flag, what was given and what is accepted.
    """
    started = time.monotonic()
    loaded = load_model(config.model, config.dtype, attention=config.attention)
    groups = loaded.model.kv_groups()
    size = size_kv(
        block_bytes=sum(group.block_bytes(config.block_size) for group in groups),
        block_size=config.block_size,
        model_len=loaded.config.max_model_len,
        available=available_memory(),
        max_running=config.max_running,
        kv_blocks=config.kv_blocks,
        kv_memory=config.kv_memory,
        max_model_len=config.max_model_len,
    )
    memory = KVMemory(groups, config.block_size, size.blocks + 1)
    budget = config.token_budget or max(config.max_running, default_token_budget(loaded.config, config.threads))
    budget_why = "--token-budget" if config.token_budget else f"half a second of {config.threads} threads"
    core = EngineCore(_core_config(config, size, budget, loaded.config.vocab_size))
    keys = config.keys
    compat = CompatFields(
        protocol_version=PROTOCOL_VERSION,
        model_digest=config.model_digest,
        dtype=loaded.dtype,
        kv_dtype=",".join(group.dtype for group in groups),
        kv_groups=tuple(group.describe() for group in groups),
        hash_key_id=keys.hash_key_id() if keys is not None else "",
    )
    ready = Ready(
        incarnation=secrets.token_bytes(_INCARNATION_BYTES),
        epoch=EPOCH,
        dtype=loaded.dtype,
        threads=config.threads,
        block_size=config.block_size,
        total_blocks=size.blocks,
        kv_bytes=memory.nbytes,
        max_model_len=size.max_model_len,
        token_budget=budget,
        layout=memory.layout(),
        compat_hash=compat.compat_hash(),
        control_port=0,
        data_port=0,
        state_port=0,
        transfer_backends={},
        attention_backends=_attention_backends(loaded),
        reasons=(*loaded.reasons, *size.reasons, f"{budget} tokens a step: {budget_why}"),
        load_s=time.monotonic() - started,
    )
    return BuiltEngine(core=core, runner=ModelRunner(loaded.model, memory), memory=memory, ready=ready, compat=compat)


def _core_config(config: EngineConfig, size: KVSize, budget: int, vocab_size: int) -> CoreConfig:
    keys = config.keys
    # Without keys no hash and no digest leaves the process: any will do.
    hash_key = keys.hash if keys is not None else secrets.token_bytes(32)
    kv_key = keys.kv if keys is not None and keys.kv is not None else secrets.token_bytes(32)
    return CoreConfig(
        block_size=config.block_size,
        blocks=size.blocks + 1,
        token_budget=budget,
        max_running=config.max_running,
        max_model_len=size.max_model_len,
        hash_key=hash_key,
        kv_key=kv_key,
        epoch=EPOCH,
        limits=config.limits,
        prefix_caching=config.prefix_caching,
        vocab_size=vocab_size,
    )


def _attention_backends(loaded: LoadedModel) -> dict[str, str]:
    """Each back end with "ok" or why not; empty for a model that uses none (the toy)."""
    if not loaded.attention:
        return {}
    return attention_reasons(loaded.config, torch.device("cpu"), TORCH_DTYPES[loaded.dtype], loaded.kernels)
