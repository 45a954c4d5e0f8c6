"""How many KV blocks an engine gets, and why. Pure."""

import re
from dataclasses import dataclass

# Of the memory that is available once the model is loaded, KV takes at most this share when nothing is configured.
_DEFAULT_SHARE = 0.25
_DEFAULT_CAP = 4 * 2**30
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class KVSize:
    """Usable blocks (block 0 comes on top), context length, and the reasons for both."""

    blocks: int
    max_model_len: int
    reasons: tuple[str, ...]


def parse_bytes(text: str) -> int:
    """Read ``512MiB``, ``2GiB``, ``1000000``. Raises ``ValueError`` naming what is accepted."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("a number of bytes, or one with KiB, MiB, GiB, KB, MB or GB, is accepted")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def size_kv(
    *,
    block_bytes: int,
    block_size: int,
    model_len: int,
    available: int,
    max_running: int,
    kv_blocks: int = 0,
    kv_memory: int = 0,
    max_model_len: int = 0,
) -> KVSize:
    """Choose the number of usable blocks and the longest sequence.

    Args:
        block_bytes: of one block, all KV groups together.
        block_size: token slots of a block.
        model_len: positions the model was made for.
        available: bytes of memory that the machine can still give.
        max_running: sequences that run at the same time at most.
        kv_blocks: usable blocks as configured; 0 leaves it to ``kv_memory``.
        kv_memory: bytes as configured; 0 leaves it to the machine.
        max_model_len: as configured; 0 takes the model's own, or less where the blocks hold less.

    Raises:
        ValueError: names the flag, what was given and what is accepted.
    """
    if max_model_len > model_len:
        raise ValueError(f"--max-model-len: {max_model_len} given; the model takes at most {model_len}")
    wanted_len = max_model_len or model_len
    if kv_blocks:
        blocks, why = kv_blocks, "--kv-blocks"
    elif kv_memory:
        blocks, why = kv_memory // block_bytes - 1, "--kv-memory"
    else:
        room = min(int(available * _DEFAULT_SHARE), _DEFAULT_CAP)
        enough = max_running * -(-wanted_len // block_size)
        blocks = min(room // block_bytes - 1, enough)
        if blocks == enough:
            why = f"enough for {max_running} sequences of {wanted_len} tokens"
        else:
            why = f"a quarter of {available / 2**30:.1f} GiB available, at most {_DEFAULT_CAP // 2**30} GiB"
    total = (blocks + 1) * block_bytes
    if blocks < 1:
        raise ValueError(
            f"KV memory ({why}): no block fits; one block of {block_size} tokens needs at least {2 * block_bytes} bytes"
        )
    if total > available:
        raise ValueError(
            f"KV memory ({why}): {blocks} blocks need {total / 2**20:.0f} MiB;"
            f" {available / 2**20:.0f} MiB are available"
        )
    capacity = blocks * block_size
    reasons = [f"{blocks} KV blocks of {block_size} tokens, {total / 2**20:.0f} MiB: {why}"]
    if max_model_len > capacity:
        raise ValueError(
            f"--max-model-len: {max_model_len} given; {blocks} blocks of {block_size} tokens hold at most {capacity}"
        )
    length = min(wanted_len, capacity)
    if max_model_len:
        reasons.append(f"context {length}: --max-model-len")
    elif length < model_len:
        reasons.append(f"context {length}: what the KV blocks hold; the model takes {model_len}")
    else:
        reasons.append(f"context {length}: the model's own")
    return KVSize(blocks=blocks, max_model_len=length, reasons=tuple(reasons))


def available_memory() -> int:
    """Bytes that this machine, or this container's limit, can still give."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _cgroup(name: str) -> int | None:
    try:
        with open(f"/sys/fs/cgroup/{name}") as file:  # noqa: PTH123 - a kernel interface, not a path to compose
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
