"""Whether a handle may be used for a request: decided from the two alone, before any peer is asked. Pure."""

import hmac
from dataclasses import dataclass

from kvferry_runtime.core.messages import Submit
from kvferry_runtime.transfer import checksums
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire.handle import KVHandle
from kvferry_wire.hashing import CompatFields, prompt_digest
from kvferry_wire.layout import LayoutDescriptor


@dataclass(frozen=True, slots=True)
class HandleFault:
    """Why a handle cannot be used; `detail` is for the log and holds no token and no key."""

    reason: RecomputeReason
    detail: str


def handle_fault(
    submit: Submit,
    handle: KVHandle,
    *,
    kv_key: bytes,
    incarnation: bytes,
    compat_hash: str,
    compat: CompatFields | None = None,
    layout: LayoutDescriptor,
    backends: frozenset[str],
) -> HandleFault | None:
    """The first reason why `handle` is of no use for `submit`, or ``None``.

    The MAC comes first: until it is verified no other field is believed.
    """
    if not handle.verified(kv_key):
        return HandleFault(RecomputeReason.MAC, "mac")
    if handle.incarnation == incarnation:
        return HandleFault(RecomputeReason.OWN_HANDLE, f"incarnation: {incarnation.hex()} is this engine")
    ids = submit.ferriable_ids()
    if not 0 < handle.token_count <= len(ids):
        return HandleFault(RecomputeReason.HANDLE, f"token_count: {handle.token_count}; 1 to {len(ids)} fit")
    digest = prompt_digest(kv_key, ids[: handle.token_count], submit.extras)
    if not hmac.compare_digest(handle.prompt_digest, digest):
        return HandleFault(RecomputeReason.DIGEST, "prompt_digest")
    if handle.compat_hash != compat_hash:
        named = None if compat is None or handle.compat is None else compat.first_difference(handle.compat)
        name, ours, theirs = named or ("compat_hash", compat_hash, handle.compat_hash)
        return HandleFault(RecomputeReason.MISMATCH, f"{name}: {theirs}; ours is {ours}")
    difference = layout.first_difference(handle.layout)
    if difference is not None:
        name, ours, theirs = difference
        return HandleFault(RecomputeReason.MISMATCH, f"layout.{name}: {theirs}; ours is {ours}")
    needed = -(-handle.token_count // layout.block_size)
    if handle.block_count != needed:
        return HandleFault(
            RecomputeReason.HANDLE, f"block_count: {handle.block_count}; {handle.token_count} tokens need {needed}"
        )
    if handle.checksum not in ("", checksums.METHOD):
        return HandleFault(RecomputeReason.MISMATCH, f"checksum: {handle.checksum}; ours is {checksums.METHOD}")
    groups = len(layout.groups) if handle.checksum else 0
    if not checksums.are_complete(handle.checksums, groups, needed):
        lengths = [len(of_group) for of_group in handle.checksums]
        return HandleFault(
            RecomputeReason.HANDLE, f"checksums: {lengths} bytes; {needed} blocks in {groups} groups are named"
        )
    if handle.lease_ms <= 0 or not 0 < handle.control_port < 2**16:
        return HandleFault(RecomputeReason.HANDLE, f"lease_ms: {handle.lease_ms}, control_port: {handle.control_port}")
    if not backends & handle.backends.keys():
        theirs = ",".join(sorted(handle.backends)) or "none"
        return HandleFault(RecomputeReason.NO_BACKEND, f"backends: {theirs}; ours are {','.join(sorted(backends))}")
    return None
