"""How many KV blocks an engine gets: as configured, or by the memory there is, always with the reason."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_runtime.engine.sizing import KVSize, available_memory, parse_bytes, size_kv

MIB = 2**20


def make_size(**changes: Any) -> KVSize:
    values: dict[str, Any] = {
        "block_bytes": MIB,
        "block_size": 16,
        "model_len": 1024,
        "available": 4096 * MIB,
        "max_running": 4,
    }
    return size_kv(**(values | changes))


def test_blocks_as_configured() -> None:
    """``--kv-blocks`` counts usable blocks, ``--kv-memory`` pays for the null block too."""
    assert make_size(kv_blocks=100).blocks == 100
    assert make_size(kv_memory=100 * MIB).blocks == 99
    assert "--kv-memory" in make_size(kv_memory=100 * MIB).reasons[0]


def test_blocks_by_need_and_by_memory() -> None:
    """Enough for every sequence at full length, or a quarter of the memory when that is less."""
    assert make_size().blocks == 4 * 64
    assert "enough for 4 sequences of 1024 tokens" in make_size().reasons[0]
    assert make_size(available=400 * MIB).blocks == 99
    assert "a quarter" in make_size(available=400 * MIB).reasons[0]


def test_the_context_is_what_fits() -> None:
    """A small pool shortens the context and says so; an explicit length that does not fit is refused."""
    assert make_size(kv_blocks=10).max_model_len == 160
    assert "what the KV blocks hold" in make_size(kv_blocks=10).reasons[1]
    assert make_size(max_model_len=100).max_model_len == 100
    with pytest.raises(ValueError, match="--max-model-len: 161 given"):
        make_size(kv_blocks=10, max_model_len=161)
    with pytest.raises(ValueError, match="--max-model-len: 1025 given; the model takes at most 1024"):
        make_size(max_model_len=1025)


def test_what_does_not_fit_is_refused_before_it_is_allocated() -> None:
    """Too little for a block, or more than there is: named with the numbers."""
    with pytest.raises(ValueError, match=r"--kv-memory.*no block fits"):
        make_size(kv_memory=MIB)
    with pytest.raises(ValueError, match=r"--kv-blocks.*5000 blocks need 5001 MiB; 4096 MiB are available"):
        make_size(kv_blocks=5000)


@given(st.integers(1, 2**24), st.integers(1, 64), st.integers(2, 8192), st.integers(0, 2**36), st.integers(1, 256))
def test_a_chosen_size_fits(block_bytes: int, block_size: int, model_len: int, available: int, running: int) -> None:
    """Whatever the model and the machine: the choice fits into memory and holds the context, or is refused."""
    try:
        size = size_kv(
            block_bytes=block_bytes,
            block_size=block_size,
            model_len=model_len,
            available=available,
            max_running=running,
        )
    except ValueError:
        assert available // 4 < 2 * block_bytes
        return
    assert (size.blocks + 1) * block_bytes <= available
    assert 1 <= size.max_model_len <= min(model_len, size.blocks * block_size)


@pytest.mark.parametrize(("text", "value"), [("512MiB", 512 * MIB), ("2 gib", 2**31), ("1.5KB", 1500), ("7", 7)])
def test_sizes_are_read(text: str, value: int) -> None:
    """Binary and decimal units, any case."""
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "x", "5 XB", "-1", "1e9", "MiB"])
def test_other_texts_are_refused(text: str) -> None:
    """What is no size is an error."""
    with pytest.raises(ValueError, match="accepted"):
        parse_bytes(text)


def test_this_machine_has_memory() -> None:
    """The figure is positive and no more than a machine could have."""
    assert 0 < available_memory() < 2**50
