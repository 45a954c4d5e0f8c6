"""The handle's MAC: no field can be changed, and no key but the service's signs."""

import msgspec
import pytest

from kvferry_wire.handle import KVHandle
from kvferry_wire.keys import ServiceKeys, curve_secret, derive, mac
from tests.wire.builders import COMPAT, GROUP, KV_KEY, LAYOUT, make_handle

CHANGES: dict[str, list[object]] = {
    "lease_id": [0, 8, -7, 2**63 - 1],
    "incarnation": [b"", b"j" * 16, b"i" * 15],
    "epoch": [0, 2],
    "host": ["", "10.0.0.2", "10.0.0.1 "],
    "control_port": [0, 5601],
    "backends": [{}, {"tcp": b""}, {"another": b""}, {"tcp": b"\x91\xcd\x15\xe1", "another": b"x"}],
    "blocks": [(), ((1, 3),), ((1,), (2,)), ((2, 1),)],
    "block_count": [0, 1, 3],
    "token_count": [19, 21],
    "compat_hash": ["", "C" * 64],
    "compat": [None, msgspec.structs.replace(COMPAT, model_digest="n")],
    "layout": [
        msgspec.structs.replace(LAYOUT, block_size=8),
        msgspec.structs.replace(LAYOUT, tensor_parallel=2),
        msgspec.structs.replace(LAYOUT, order="x"),
        msgspec.structs.replace(LAYOUT, groups=(GROUP, GROUP)),
    ],
    "lease_ms": [0, 15_001],
    "checksum": ["", "crc32"],
    "checksums": [(), (b"sum of 2sum of 1",), (b"sum of 1", b"sum of 2")],
    "prompt_digest": [b"", b"e" * 32],
    "mac": [b"", b"\0" * 32],
}
CASES = [(field, value) for field, values in CHANGES.items() for value in values]


def test_every_field_has_a_case() -> None:
    """A field added to the handle must be added here."""
    assert set(CHANGES) == set(KVHandle.__struct_fields__)


def test_a_signed_handle_is_verified_also_after_the_wire() -> None:
    """Signing, encoding and decoding change nothing that the MAC covers."""
    signed = make_handle().signed(KV_KEY)
    assert signed.verified(KV_KEY)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(signed), type=KVHandle)
    assert decoded == signed and decoded.verified(KV_KEY)


@pytest.mark.parametrize(("field", "value"), CASES, ids=str)
def test_a_changed_field_is_found(field: str, value: object) -> None:
    """Whatever is changed after signing, the handle is no longer verified."""
    assert not msgspec.structs.replace(make_handle().signed(KV_KEY), **{field: value}).verified(KV_KEY)


def test_every_flipped_bit_of_the_mac_is_found() -> None:
    """No bit of it is ignored, and it cannot be cut or lengthened."""
    signed = make_handle().signed(KV_KEY)
    for bit in range(256):
        flipped = bytearray(signed.mac)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not msgspec.structs.replace(signed, mac=bytes(flipped)).verified(KV_KEY)
    for other in (signed.mac[:-1], signed.mac + b"\0"):
        assert not msgspec.structs.replace(signed, mac=other).verified(KV_KEY)


def test_the_order_of_back_ends_does_not_matter() -> None:
    """Equal handles have equal MACs, however their mapping was filled."""
    one = make_handle(backends={"a": b"1", "b": b"2"}).signed(KV_KEY)
    other = make_handle(backends={"b": b"2", "a": b"1"}).signed(KV_KEY)
    assert one.mac == other.mac


def test_other_keys_and_purposes_do_not_verify() -> None:
    """Another service's key, a derived key, and a MAC of the same bytes for another purpose."""
    signed = make_handle().signed(KV_KEY)
    assert not signed.verified(b"o" * 32)
    assert not make_handle().signed(derive(KV_KEY, "handle")).verified(KV_KEY)
    assert mac(KV_KEY, "one", b"message") != mac(KV_KEY, "two", b"message")


def test_keys_are_separated_and_not_shown() -> None:
    """Each purpose has its own bytes; a repr holds no key."""
    assert len({curve_secret(key, side) for key in (b"a" * 32, b"b" * 32) for side in ("server", "client")}) == 4
    keys = ServiceKeys(http=b"http-secret", state=b"state-secret", hash=b"hash-secret", kv=b"kv-secret")
    assert "secret" not in repr(keys)
    assert "kv" not in repr(ServiceKeys(http=b"x", state=b"x", hash=b"x"))
