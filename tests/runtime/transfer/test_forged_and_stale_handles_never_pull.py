"""Handles that name what is not leased to them, rightly signed or not, never give valid blocks."""

from collections.abc import Iterator

import msgspec
import pytest

from kvferry_runtime.core.messages import PullFinished
from kvferry_runtime.transfer.backends.tcp import TcpDescriptor
from kvferry_wire.data import encode
from kvferry_wire.handle import KVHandle
from kvferry_wire.hashing import CompatFields
from tests.runtime.transfer.builders import (
    KV_KEY,
    Engine,
    make_engine,
    make_limits,
    make_submit,
    running,
)

PROMPT = tuple(range(48))
BLOCKS = ((4, 9, 2),)
LIMITS = make_limits(connect_s=0.5, transfer_floor_s=0.5)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    """An owner and a reader, shared: a forged handle must not spoil what comes after it."""
    owner, reader = make_engine(fill=True, limits=LIMITS), make_engine(limits=LIMITS)
    with running(owner, reader):
        yield owner, reader


def make_compat(model: str) -> CompatFields:
    return CompatFields(
        protocol_version=3, model_digest=model, dtype="float32", kv_dtype="float32", kv_groups=("g",), hash_key_id="k"
    )


RAW = {
    "lease_id": 2,
    "incarnation": b"z" * 16,
    "epoch": 2,
    "host": "127.0.0.2",
    "control_port": 1,
    "backends": {"tcp": b"x"},
    "blocks": ((1, 2, 3),),
    "block_count": 4,
    "token_count": 47,
    "compat_hash": "other",
    "compat": make_compat("other"),
    "lease_ms": 10**9,
    "checksum": "",
    "checksums": (b"x",),
    "prompt_digest": b"x" * 32,
    "mac": b"x" * 32,
}


@pytest.mark.parametrize("field", RAW)
def test_a_changed_field_is_refused_before_anyone_is_asked(pair: tuple[Engine, Engine], field: str) -> None:
    """Without the key nobody changes a handle: `check` says ``mac``, and nothing is sent."""
    owner, reader = pair
    handle = owner.grant(BLOCKS, PROMPT)
    before = reader.service.state().handshakes
    forged = msgspec.structs.replace(handle, **{field: RAW[field]})
    assert reader.service.check(make_submit(PROMPT, forged)) == "mac"
    assert reader.service.check(make_submit(PROMPT, handle)) == ""
    assert reader.service.check(make_submit((*PROMPT[:-1], 7), handle)) == "digest"
    assert reader.service.state().handshakes == before
    owner.service.withdraw(handle.lease_id)


def test_an_engine_refuses_its_own_handle(pair: tuple[Engine, Engine]) -> None:
    """A handle of this very incarnation is no remote KV."""
    owner, _ = pair
    handle = owner.grant(BLOCKS, PROMPT)
    assert owner.service.check(make_submit(PROMPT, handle)) == "own_handle"
    owner.service.withdraw(handle.lease_id)


def signed(handle: KVHandle, **changes: object) -> KVHandle:
    """A change made with the key, as by a confused engine."""
    return msgspec.structs.replace(handle, **changes).signed(KV_KEY)


SIGNED = {
    "a lease never granted": (lambda h, o: signed(h, lease_id=h.lease_id + 1000), "lease_unknown"),
    "a negative lease": (lambda h, o: signed(h, lease_id=-1), "lease_unknown"),
    "another incarnation": (lambda h, o: signed(h, incarnation=b"z" * 16), "lease_unknown"),
    "an older epoch": (lambda h, o: signed(h, epoch=0), "lease_unknown"),
    "a later epoch": (lambda h, o: signed(h, epoch=2), "lease_unknown"),
    "another digest": (lambda h, o: signed(h, prompt_digest=b"x" * 32), "lease_unknown"),
    "no digest": (lambda h, o: signed(h, prompt_digest=b""), "lease_unknown"),
    "more blocks than leased": (lambda h, o: signed(h, block_count=4), "read_error"),
    "nobody at the data port": (lambda h, o: signed(h, backends={"tcp": encode(TcpDescriptor(1))}), "connect"),
    "another protocol at the data port": (
        lambda h, o: signed(h, backends={"tcp": encode(TcpDescriptor(o.ports.control))}),
        "connect",
    ),
    "a garbled descriptor": (lambda h, o: signed(h, backends={"tcp": b"\xc1"}), "no_backend"),
    "an impossible data port": (lambda h, o: signed(h, backends={"tcp": encode(TcpDescriptor(70_000))}), "no_backend"),
    "no shared back end": (lambda h, o: signed(h, backends={"nixl": b""}), "no_backend"),
    "nobody at the control port": (lambda h, o: signed(h, control_port=1), "peer_dead"),
    "another protocol at the control port": (lambda h, o: signed(h, control_port=o.ports.data), "peer_dead"),
    "a host that is none": (lambda h, o: signed(h, host="no such host!"), "peer_dead"),
    "a host too long for a name": (lambda h, o: signed(h, host="a" * 300), "peer_dead"),
    "no host": (lambda h, o: signed(h, host=""), "peer_dead"),
    "nobody at the host": (lambda h, o: signed(h, host="127.0.0.9"), "peer_dead"),
}


@pytest.mark.parametrize(("forge", "reason"), SIGNED.values(), ids=SIGNED)
def test_a_wrong_handle_ends_with_its_reason(pair: tuple[Engine, Engine], forge: object, reason: str) -> None:
    """Signed or not: nothing is valid, the end is named and comes within the deadlines."""
    owner, reader = pair
    handle = forge(owner.grant(BLOCKS, PROMPT), owner)
    local = (tuple(range(1, handle.block_count + 1)),)
    finished = reader.pull(handle, local, deadline_s=5.0)
    assert isinstance(finished, PullFinished)
    assert finished.reason == reason
    assert finished.seconds < 2.0
    good = owner.grant(BLOCKS, PROMPT)
    assert reader.pull(good, ((1, 2, 3),)).reason == ""


@pytest.mark.parametrize("blocks", [((1, 2),), ((1, 2, 3, 4),), ((1, 2, 3), (1, 2, 3)), ()], ids=str)
def test_blocks_that_do_not_fit_the_handle_are_never_written(
    pair: tuple[Engine, Engine], blocks: tuple[tuple[int, ...], ...]
) -> None:
    """As many ids per group as the handle has blocks, and as many groups as the layout, or it ends at once."""
    owner, reader = pair
    before = reader.bytes_of(0, tuple(range(1, 64)))
    assert reader.pull(owner.grant(BLOCKS, PROMPT), blocks).reason == "handle"
    assert reader.bytes_of(0, tuple(range(1, 64))) == before


def test_a_handle_is_good_once(pair: tuple[Engine, Engine]) -> None:
    """A second pull of the same handle is void, whoever asks and how often."""
    owner, reader = pair
    handle = owner.grant(BLOCKS, PROMPT)
    assert reader.pull(handle, ((1, 2, 3),)).reason == ""
    for _ in range(3):
        assert reader.pull(handle, ((1, 2, 3),)).reason == "lease_unknown"


def test_an_expired_or_withdrawn_lease_is_void(pair: tuple[Engine, Engine]) -> None:
    """The reader hears that it is over."""
    owner, reader = pair
    handle = owner.grant(BLOCKS, PROMPT)
    owner.service.withdraw(handle.lease_id)
    assert reader.pull(handle, ((1, 2, 3),)).reason == "lease_expired"


def test_a_raised_epoch_voids_handles() -> None:
    """Handles of the older epoch are void, those of the new one are good."""
    owner, reader = make_engine(fill=True, limits=LIMITS), make_engine(limits=LIMITS)
    with running(owner, reader):
        handle = owner.grant(BLOCKS, PROMPT)
        owner.service.raise_epoch(2)
        assert reader.pull(handle, ((1, 2, 3),)).reason == "lease_expired"
        owner.config = msgspec.structs.replace(owner.config, epoch=2)
        assert reader.pull(owner.grant(BLOCKS, PROMPT), ((1, 2, 3),)).reason == ""


def test_handles_of_a_restarted_owner_are_void() -> None:
    """Same ports, new incarnation: the old handle is unknown, a new one is good at once."""
    owner, reader = make_engine(fill=True, limits=LIMITS), make_engine(limits=LIMITS)
    with running(reader):
        first = owner.grant(BLOCKS, PROMPT)
        assert reader.pull(first, ((1, 2, 3),)).reason == ""
        old = owner.grant(BLOCKS, PROMPT)
        owner.service.close(5.0)
        again = make_engine(fill=True, limits=LIMITS, control_port=owner.ports.control, data_port=owner.ports.data)
        with running(again):
            assert reader.pull(old, ((1, 2, 3),)).reason == "lease_unknown"
            assert reader.pull(again.grant(BLOCKS, PROMPT), ((1, 2, 3),)).reason == ""
            assert reader.bytes_of(0, (1, 2, 3)) == again.bytes_of(0, BLOCKS[0])
            assert reader.service.state().peers == 1


def test_engines_of_another_model_are_refused_once() -> None:
    """A compat hash that differs is refused before any byte, and never asked again."""
    owner, reader = make_engine(compat_hash="one", limits=LIMITS), make_engine(compat_hash="two", limits=LIMITS)
    with running(owner, reader):
        for _ in range(3):
            handle = owner.grant(BLOCKS, PROMPT)
            assert reader.service.check(make_submit(PROMPT, handle)) == "mismatch"
            assert reader.pull(handle, ((1, 2, 3),)).reason == "mismatch"
        assert reader.service.state().handshakes == 1
        assert owner.service.state().sent_bytes == 0
