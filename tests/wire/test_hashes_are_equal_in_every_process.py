"""Hashes and digests: the same bytes in every process, and different bytes for whatever differs."""

import itertools
import os
import random
import subprocess
import sys

import pytest

from kvferry_wire.canonical import KeyExtras
from kvferry_wire.hashing import CompatFields, block_hash, chain_hashes, prompt_digest

KEY = b"h" * 32

SCRIPT = """
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.hashing import CompatFields, chain_hashes, prompt_digest
key, tokens = b"h" * 32, list(range(1000, 1050))
for extras in (
    KeyExtras(),
    KeyExtras(tenant_salt=b"salt"),
    KeyExtras(adapter="adapter", adapter_generation=3),
    KeyExtras(media=(b"one", b"two")),
):
    print([digest.hex() for digest in chain_hashes(key, tokens, 16, extras)], prompt_digest(key, tokens, extras).hex())
print(CompatFields(protocol_version=1, model_digest="m", dtype="float32", kv_dtype="float32", kv_groups=("g",),
                   hash_key_id="k").compat_hash())
"""


def test_processes_with_other_hash_seeds_agree() -> None:
    """Bare, salted, with adapter, with media, first blocks and later ones: nothing depends on PYTHONHASHSEED."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == 5


def test_the_hashes_of_version_1_are_these() -> None:
    """A change of the canonical bytes or of the construction shows here, and needs a new protocol version."""
    assert block_hash(KEY, None, range(16), KeyExtras().canonical()).hex() == GOLDEN_BLOCK
    assert prompt_digest(KEY, range(20), KeyExtras(tenant_salt=b"t")).hex() == GOLDEN_DIGEST


GOLDEN_BLOCK = "ad9529c58db68bc7a9e16bd0cc20b202"
GOLDEN_DIGEST = "04c44f96f9ee8b978fee8bcb25565872cc89a8c673ea786ed9dd469fbe325872"


def variants() -> dict[str, tuple[tuple[int, ...], KeyExtras]]:
    tokens = tuple(range(100, 116))
    return {
        "base": (tokens, KeyExtras()),
        "one token": ((*tokens[:-1], 7), KeyExtras()),
        "another order": (tokens[::-1], KeyExtras()),
        "one token fewer": (tokens[:-1], KeyExtras()),
        "one token more": ((*tokens, 0), KeyExtras()),
        "a salt": (tokens, KeyExtras(tenant_salt=b"name")),
        "an adapter of the salt's name": (tokens, KeyExtras(adapter="name")),
        "media of the salt's name": (tokens, KeyExtras(media=(b"name",))),
        "an adapter's generation": (tokens, KeyExtras(adapter="name", adapter_generation=1)),
        "a generation alone": (tokens, KeyExtras(adapter_generation=1)),
        "two media": (tokens, KeyExtras(media=(b"na", b"me"))),
        "two media, cut elsewhere": (tokens, KeyExtras(media=(b"n", b"ame"))),
        "two media, swapped": (tokens, KeyExtras(media=(b"me", b"na"))),
        "salt and adapter": (tokens, KeyExtras(tenant_salt=b"na", adapter="me")),
        "salt and adapter, cut elsewhere": (tokens, KeyExtras(tenant_salt=b"n", adapter="ame")),
    }


def test_whatever_differs_hashes_differently() -> None:
    """Tokens, order, length, and each of the extras apart from its neighbours."""
    digests = {name: prompt_digest(KEY, tokens, extras) for name, (tokens, extras) in variants().items()}
    hashes = {name: block_hash(KEY, None, tokens, extras.canonical()) for name, (tokens, extras) in variants().items()}
    assert len(set(digests.values())) == len(digests)
    assert len(set(hashes.values())) == len(hashes)


def test_a_tag_separates_token_bytes_from_extras() -> None:
    """Extras that spell token bytes, and tokens that spell extras, are not mistaken for each other."""
    salted = KeyExtras(tenant_salt=b"\x01\x00\x00\x00")
    assert prompt_digest(KEY, (1,), KeyExtras()) != prompt_digest(KEY, (), salted)
    spelled = [int.from_bytes(salted.canonical()[at : at + 4], "little") for at in range(0, 8, 4)]
    assert prompt_digest(KEY, spelled, KeyExtras()) != prompt_digest(KEY, (), salted)


def test_parent_position_and_key_matter() -> None:
    """The same tokens after another block, as a first block, or under another key are another block."""
    extras = KeyExtras().canonical()
    parents = (None, b"p" * 16, b"q" * 16)
    hashes = {
        block_hash(key, parent, (1, 2, 3), extras) for key, parent in itertools.product((KEY, b"o" * 32), parents)
    }
    assert len(hashes) == 6


def test_chains_grow_from_their_prefix() -> None:
    """A longer sequence begins with the hashes of its prefix; partial blocks have none."""
    tokens = list(range(100))
    whole = chain_hashes(KEY, tokens, 16, KeyExtras())
    assert len(whole) == 6
    for length in range(0, 100, 7):
        assert chain_hashes(KEY, tokens[:length], 16, KeyExtras()) == whole[: length // 16]
    assert chain_hashes(KEY, [1, *tokens[1:]], 16, KeyExtras())[-1] != whole[-1]


def test_random_pairs_share_no_block() -> None:
    """20,000 random short prompts of small alphabets: equal hashes only for equal content."""
    rng = random.Random(3)
    seen: dict[bytes, tuple[object, ...]] = {}
    for _ in range(20_000):
        tokens = tuple(rng.randrange(4) for _ in range(4))
        extras = KeyExtras(tenant_salt=bytes((rng.randrange(4),)), adapter=rng.choice(["", "a", "b"]))
        content = (tokens, extras)
        assert seen.setdefault(block_hash(KEY, None, tokens, extras.canonical()), content) == content


@pytest.mark.parametrize("tokens", [(-1,), (2**32,), (2**64,)], ids=str)
def test_ids_outside_32_bits_raise(tokens: tuple[int, ...]) -> None:
    """No id is cut to fit."""
    with pytest.raises(OverflowError):
        prompt_digest(KEY, tokens, KeyExtras())


def test_the_compat_hash_depends_on_every_field() -> None:
    """Two engines pair only if all six are equal; groups are not run together."""
    base = {
        "protocol_version": 1,
        "model_digest": "m",
        "dtype": "float32",
        "kv_dtype": "float32",
        "kv_groups": ("ab", "c"),
        "hash_key_id": "k",
    }
    changes = {
        "protocol_version": 2,
        "model_digest": "n",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "kv_groups": ("a", "bc"),
        "hash_key_id": "l",
    }
    hashes = {CompatFields(**base).compat_hash()}
    hashes |= {CompatFields(**{**base, name: value}).compat_hash() for name, value in changes.items()}
    assert len(hashes) == 7
