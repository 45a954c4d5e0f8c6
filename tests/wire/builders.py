"""Builders shared by the tests of this folder."""

import msgspec

from kvferry_wire.control import HelloBody, LeaseRef
from kvferry_wire.handle import KVHandle
from kvferry_wire.hashing import CompatFields
from kvferry_wire.layout import BLOCK_ORDER, KVGroup, LayoutDescriptor

KV_KEY = b"k" * 32
GROUP = KVGroup(name="full", layers=2, kv_heads=1, head_dim=4, dtype="float32")
LAYOUT = LayoutDescriptor(block_size=16, tensor_parallel=1, order=BLOCK_ORDER, groups=(GROUP,))


COMPAT = CompatFields(
    protocol_version=3,
    model_digest="m" * 64,
    dtype="float32",
    kv_dtype="float32",
    kv_groups=(GROUP.describe(),),
    hash_key_id="k" * 16,
)


def make_handle(**changes: object) -> KVHandle:
    handle = KVHandle(
        lease_id=7,
        incarnation=b"i" * 16,
        epoch=1,
        host="10.0.0.1",
        control_port=5600,
        backends={"tcp": b"\x91\xcd\x15\xe1", "another": b""},
        blocks=((1, 2),),
        block_count=2,
        token_count=20,
        compat_hash="c" * 64,
        compat=COMPAT,
        layout=LAYOUT,
        lease_ms=15_000,
        checksum="xxh3-64",
        checksums=(b"sum of 1sum of 2",),
        prompt_digest=b"d" * 32,
    )
    return msgspec.structs.replace(handle, **changes)


def make_ref() -> LeaseRef:
    return LeaseRef(lease_id=7, incarnation=b"i" * 16, epoch=1, prompt_digest=b"d" * 32)


def make_hello_body() -> HelloBody:
    return HelloBody(incarnation=b"i" * 16, epoch=1, layout=LAYOUT, backends={"tcp": b"\x91\xcd\x15\xe1"})
