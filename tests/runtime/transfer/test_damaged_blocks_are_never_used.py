"""Checksums: whatever is not, bit by bit, what the owner granted is found before it counts as KV."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_runtime.core.messages import LeaseEnded
from kvferry_runtime.transfer.backends.tcp_link import HEAD
from kvferry_runtime.transfer.checksums import METHOD, SUM_BYTES, block_sums, first_damaged
from kvferry_runtime.transfer.memory import ToyBlockMemory
from kvferry_wire.data import NONCE_BYTES, PROOF_BYTES, ReadReply, encode
from tests.runtime.transfer.builders import FULL, SLIDING, Engine, make_engine, make_submit, running
from tests.runtime.transfer.slow_paths import Proxy, through

PROMPT = tuple(range(40 * 16))
REMOTE = tuple(range(1, 41))
LOCAL = tuple(range(50, 10, -1))
BLOCK_BYTES = FULL.block_bytes(16)
# Toward the reader, before the blocks: nonce, proof, and the answer to the one read.
BEFORE_BLOCKS = NONCE_BYTES + PROOF_BYTES + HEAD.size + len(encode(ReadReply("ok", 40 * BLOCK_BYTES)))


@pytest.mark.parametrize("at", [0, 1, 20 * BLOCK_BYTES + 77, 40 * BLOCK_BYTES - 1], ids=str)
def test_a_bit_that_flips_on_its_way_costs_a_recompute_and_no_wrong_byte(at: int) -> None:
    """The pull ends with `checksum`; its owner has its blocks back, whatever it hears first; the next is good."""
    owner, reader = make_engine(fill=True), make_engine()
    with running(owner, reader), Proxy(owner.ports.data, flip_at=BEFORE_BLOCKS + at) as proxy:
        assert reader.pull(through(proxy, owner.grant((REMOTE,), PROMPT)), (LOCAL,)).reason == "checksum"
        assert owner.next_post() in [LeaseEnded(lease_id=1, why=why) for why in ("released", "failed")]
        assert reader.service.state().pulls_failed == {"checksum": 1}
        assert reader.pull(owner.grant((REMOTE,), PROMPT), (LOCAL,)).reason == ""
        assert reader.bytes_of(0, LOCAL) == owner.bytes_of(0, REMOTE)


def test_without_checksums_that_bit_would_have_been_used() -> None:
    """The flip above is a real one, and nothing else in the transfer finds it."""
    owner, reader = make_engine(fill=True, checksums=False), make_engine()
    with running(owner, reader), Proxy(owner.ports.data, flip_at=BEFORE_BLOCKS + 5) as proxy:
        handle = owner.grant((REMOTE,), PROMPT)
        assert (handle.checksum, handle.checksums) == ("", ())
        assert reader.service.check(make_submit(PROMPT, handle)) == ""
        assert reader.pull(through(proxy, handle), (LOCAL,)).reason == ""
        found, right = reader.bytes_of(0, LOCAL), owner.bytes_of(0, REMOTE)
        assert [index for index in range(40) if found[index] != right[index]] == [0]


def test_a_block_that_its_owner_overwrote_is_found() -> None:
    """The lease is live and every byte arrives: only the checksum, made at the grant, tells that it is another's KV."""
    owner, reader = make_engine(fill=True), make_engine()
    with running(owner, reader):
        for block_id in (1, 17, 40):
            handle = owner.grant((REMOTE,), PROMPT)
            owner.memory.block(0, block_id)[100] ^= 1
            assert reader.pull(handle, (LOCAL,)).reason == "checksum"


def test_every_group_is_checked() -> None:
    """Each has checksums of its own."""
    owner = make_engine(fill=True, groups=(FULL, SLIDING))
    reader = make_engine(groups=(FULL, SLIDING))
    with running(owner, reader):
        handle = owner.grant(((1, 2), (3, 4)), PROMPT[:32])
        assert [len(sums) for sums in handle.checksums] == [2 * SUM_BYTES] * 2
        assert reader.pull(handle, ((5, 6), (7, 8))).reason == ""
        handle = owner.grant(((1, 2), (3, 4)), PROMPT[:32])
        owner.memory.block(1, 4)[0] ^= 1
        assert reader.pull(handle, ((5, 6), (7, 8))).reason == "checksum"


def test_engines_that_differ_in_the_setting_still_ferry() -> None:
    """The handle says whether it has checksums: a reader checks what it is given, in a rollout of the setting too."""
    engines: list[Engine] = [make_engine(fill=True, checksums=on) for on in (True, False)]
    with running(*engines):
        for owner, reader in (engines, engines[::-1]):
            handle = owner.grant((REMOTE,), PROMPT)
            assert handle.checksum == (METHOD if owner is engines[0] else "")
            assert reader.service.check(make_submit(PROMPT, handle)) == ""
            assert reader.pull(handle, (LOCAL,)).reason == ""
            assert owner.next_post() == LeaseEnded(lease_id=1, why="released")
            assert reader.bytes_of(0, LOCAL) == owner.bytes_of(0, REMOTE)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), block=st.integers(0, 7), byte=st.integers(0, BLOCK_BYTES - 1), bit=st.integers(0, 7))
def test_any_one_bit_of_any_block_is_found(seed: int, block: int, byte: int, bit: int) -> None:
    """By the index in the lease's order, wherever the block lies in memory."""
    memory = ToyBlockMemory((FULL,), 16, 20)
    ids = random.Random(seed).sample(range(1, 20), 8)
    for block_id in ids:
        memory.block(0, block_id)[:] = random.Random(f"{seed}/{block_id}").randbytes(BLOCK_BYTES)
    (sums,) = block_sums(memory, (ids,))
    blocks = [memory.block(0, block_id) for block_id in ids]
    assert first_damaged(blocks, sums, 0) is None
    memory.block(0, ids[block])[byte] ^= 1 << bit
    assert first_damaged(blocks, sums, 0) == block
    assert first_damaged(blocks[block:], sums, block) == block
    assert first_damaged(blocks[:block], sums, 0) is None


def test_two_blocks_in_the_wrong_places_are_found() -> None:
    """Equal bytes in another order are damage too."""
    memory = ToyBlockMemory((FULL,), 16, 4)
    memory.block(0, 1)[0], memory.block(0, 2)[0] = 1, 2
    (sums,) = block_sums(memory, ((1, 2),))
    assert first_damaged([memory.block(0, 2), memory.block(0, 1)], sums, 0) == 0
