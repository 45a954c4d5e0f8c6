"""A handle is used only for the very request, service, model and layout that it was made for."""

import msgspec
import pytest

from kvferry_runtime.transfer.check import HandleFault, handle_fault
from kvferry_runtime.transfer.checksums import METHOD
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.handle import KVHandle
from kvferry_wire.hashing import CompatFields, prompt_digest
from kvferry_wire.layout import BLOCK_ORDER, LayoutDescriptor
from tests.runtime.transfer.builders import FULL, KV_KEY, OWNER, READER, SLIDING, make_submit

PROMPT = tuple(range(90_100, 90_140))
LAYOUT = LayoutDescriptor(block_size=16, tensor_parallel=1, order=BLOCK_ORDER, groups=(FULL,))


def make_handle(key: bytes = KV_KEY, **changes: object) -> KVHandle:
    handle = KVHandle(
        lease_id=1,
        incarnation=OWNER,
        epoch=1,
        host="127.0.0.1",
        control_port=5600,
        backends={"tcp": b"p"},
        block_count=3,
        token_count=len(PROMPT),
        compat_hash="c",
        layout=LAYOUT,
        lease_ms=15_000,
        prompt_digest=prompt_digest(KV_KEY, PROMPT, KeyExtras()),
    )
    return msgspec.structs.replace(handle, **changes).signed(key)


def fault_of(handle: KVHandle, prompt: tuple[int, ...] = PROMPT, extras: KeyExtras | None = None) -> HandleFault | None:
    return handle_fault(
        make_submit(prompt, handle, extras=extras or KeyExtras()),
        handle,
        kv_key=KV_KEY,
        incarnation=READER,
        compat_hash="c",
        layout=LAYOUT,
        backends=frozenset({"tcp"}),
    )


def test_the_right_handle_is_used() -> None:
    """Nothing is found wrong with it."""
    assert fault_of(make_handle()) is None
    assert fault_of(make_handle(checksum=METHOD, checksums=(b"1" * 24,))) is None


FAULTS = {
    "another service's": (make_handle(b"other" * 6), RecomputeReason.MAC),
    "unsigned": (msgspec.structs.replace(make_handle(), mac=b""), RecomputeReason.MAC),
    "changed after signing": (msgspec.structs.replace(make_handle(), lease_id=2), RecomputeReason.MAC),
    "its own": (make_handle(incarnation=READER), RecomputeReason.OWN_HANDLE),
    "no tokens": (make_handle(token_count=0), RecomputeReason.HANDLE),
    "fewer tokens than its digest": (make_handle(token_count=39), RecomputeReason.DIGEST),
    "too many tokens": (make_handle(token_count=41), RecomputeReason.HANDLE),
    "no blocks": (make_handle(block_count=0), RecomputeReason.HANDLE),
    "too few blocks": (make_handle(block_count=2), RecomputeReason.HANDLE),
    "too many blocks": (make_handle(block_count=10**6), RecomputeReason.HANDLE),
    "negative blocks": (make_handle(block_count=-3), RecomputeReason.HANDLE),
    "no lease time": (make_handle(lease_ms=0), RecomputeReason.HANDLE),
    "no port": (make_handle(control_port=0), RecomputeReason.HANDLE),
    "an impossible port": (make_handle(control_port=70_000), RecomputeReason.HANDLE),
    "another digest": (make_handle(prompt_digest=b"x" * 32), RecomputeReason.DIGEST),
    "an empty digest": (make_handle(prompt_digest=b""), RecomputeReason.DIGEST),
    "another model": (make_handle(compat_hash="d"), RecomputeReason.MISMATCH),
    "another block size": (make_handle(layout=msgspec.structs.replace(LAYOUT, block_size=8)), RecomputeReason.MISMATCH),
    "another shape": (make_handle(layout=msgspec.structs.replace(LAYOUT, groups=(SLIDING,))), RecomputeReason.MISMATCH),
    "checksums of another method": (make_handle(checksum="crc32", checksums=(b"1" * 24,)), RecomputeReason.MISMATCH),
    "a method without checksums": (make_handle(checksum=METHOD), RecomputeReason.HANDLE),
    "checksums of too few blocks": (make_handle(checksum=METHOD, checksums=(b"1" * 16,)), RecomputeReason.HANDLE),
    "checksums of too many blocks": (make_handle(checksum=METHOD, checksums=(b"1" * 32,)), RecomputeReason.HANDLE),
    "checksums of too many groups": (make_handle(checksum=METHOD, checksums=(b"1" * 24,) * 2), RecomputeReason.HANDLE),
    "checksums without a method": (make_handle(checksums=(b"1" * 24,)), RecomputeReason.HANDLE),
    "no shared back end": (make_handle(backends={"nixl": b""}), RecomputeReason.NO_BACKEND),
    "no back end": (make_handle(backends={}), RecomputeReason.NO_BACKEND),
}


@pytest.mark.parametrize(("handle", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_handle_is_refused_with_its_reason(handle: KVHandle, reason: RecomputeReason) -> None:
    """Each fault has its label, and the detail for the log shows no token."""
    fault = fault_of(handle)
    assert fault is not None and fault.reason is reason
    assert not any(str(token) in fault.detail for token in PROMPT)


def test_a_handle_of_another_model_is_refused_by_the_field_that_differs() -> None:
    """The log says what an operator can compare, not two hashes."""
    ours = CompatFields(
        protocol_version=3, model_digest="m", dtype="float32", kv_dtype="float32", kv_groups=("g",), hash_key_id="k"
    )
    theirs = msgspec.structs.replace(ours, model_digest="another")
    handle = make_handle(compat_hash=theirs.compat_hash(), compat=theirs)
    fault = handle_fault(
        make_submit(PROMPT, handle),
        handle,
        kv_key=KV_KEY,
        incarnation=READER,
        compat_hash=ours.compat_hash(),
        compat=ours,
        layout=LAYOUT,
        backends=frozenset({"tcp"}),
    )
    assert fault == HandleFault(RecomputeReason.MISMATCH, "model_digest: another; ours is m")


OTHER_REQUESTS = {
    "one other token": ((*PROMPT[:-1], 7), KeyExtras()),
    "tokens in another order": (PROMPT[::-1], KeyExtras()),
    "another tenant": (PROMPT, KeyExtras(tenant_salt=b"t")),
    "another adapter": (PROMPT, KeyExtras(adapter="a")),
    "another adapter generation": (PROMPT, KeyExtras(adapter_generation=1)),
    "other media": (PROMPT, KeyExtras(media=(b"m",))),
}


@pytest.mark.parametrize(("prompt", "extras"), OTHER_REQUESTS.values(), ids=OTHER_REQUESTS)
def test_a_handle_of_another_request_is_refused(prompt: tuple[int, ...], extras: KeyExtras) -> None:
    """The digest is over the tokens, the tenant, the adapter and the media."""
    fault = fault_of(make_handle(), prompt, extras)
    assert fault is not None and fault.reason is RecomputeReason.DIGEST
