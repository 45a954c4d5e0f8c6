"""Outputs go to the leg they name, within a bound; what reaches nobody gives its lease back."""

import asyncio

import pytest

from kvferry_runtime.core.messages import FailOut, LegKey, PrefilledOut, TokensOut
from kvferry_runtime.engine.streams import LegStreams
from kvferry_wire.handle import KVHandle
from kvferry_wire.layout import BLOCK_ORDER, LayoutDescriptor

KEY = LegKey("a", 0)


def make_tokens(key: LegKey = KEY, token: int = 1) -> TokensOut:
    return TokensOut(key=key, choice=0, ids=(token,))


def make_prefilled(key: LegKey, lease_id: int) -> PrefilledOut:
    handle = KVHandle(
        lease_id=lease_id,
        incarnation=bytes(16),
        epoch=1,
        host="h",
        control_port=1,
        backends={},
        block_count=1,
        token_count=1,
        compat_hash="",
        layout=LayoutDescriptor(block_size=1, tensor_parallel=1, order=BLOCK_ORDER, groups=()),
        lease_ms=1,
        prompt_digest=b"",
    )
    return PrefilledOut(key=key, first=(1,), cached_tokens=0, handle=handle)


async def test_outputs_come_in_order_to_the_leg_they_name() -> None:
    """Two legs never see each other's; an attempt is another leg."""
    streams = LegStreams(10)
    first, second = streams.open(KEY), streams.open(LegKey("a", 1))
    for token in (1, 2):
        assert streams.dispatch(make_tokens(token=token)) is None
    assert streams.dispatch(make_tokens(LegKey("a", 1), 9)) is None
    assert await first.next(0.1) == make_tokens(token=1)
    assert first.take() == [make_tokens(token=2)]
    assert second.take() == [make_tokens(LegKey("a", 1), 9)]
    assert await first.next(0.01) is None


async def test_a_waiting_leg_is_woken() -> None:
    """An output that arrives later ends the wait."""
    streams = LegStreams(10)
    stream = streams.open(KEY)
    waiting = asyncio.create_task(stream.next(5))
    await asyncio.sleep(0)
    streams.dispatch(make_tokens())
    assert await asyncio.wait_for(waiting, 1) == make_tokens()


async def test_a_name_runs_once() -> None:
    """A second leg of the same name is refused until the first is closed."""
    streams = LegStreams(10)
    streams.open(KEY)
    with pytest.raises(KeyError):
        streams.open(KEY)
    streams.close(KEY)
    streams.close(KEY)
    assert len(streams) == 0
    streams.open(KEY)


async def test_a_full_queue_fails_its_leg_alone() -> None:
    """The leg ends with an error, what waited is dropped, and the caller is told to abort it."""
    streams = LegStreams(2)
    stream, other = streams.open(KEY), streams.open(LegKey("b", 0))
    streams.dispatch(make_tokens())
    streams.dispatch(make_tokens())
    lost = streams.dispatch(make_tokens())
    assert lost is not None
    assert lost.overflow
    (fail,) = stream.take()
    assert isinstance(fail, FailOut)
    assert streams.dispatch(make_tokens(LegKey("b", 0))) is None
    assert len(other.take()) == 1


async def test_what_reaches_no_leg_gives_its_lease_back() -> None:
    """A prefill answer for a leg that has gone names the lease to withdraw."""
    streams = LegStreams(2)
    lost = streams.dispatch(make_prefilled(KEY, 7))
    assert lost is not None
    assert (lost.lease_id, lost.overflow) == (7, False)
    lost = streams.dispatch(make_tokens())
    assert lost is not None
    assert lost.lease_id is None


async def test_the_engines_end_fails_every_leg() -> None:
    """All legs get one ``internal``, after which nothing of the dead engine is left."""
    streams = LegStreams(5)
    legs = [streams.open(LegKey(name, 0)) for name in "abc"]
    streams.dispatch(make_tokens(LegKey("a", 0)))
    assert streams.fail_all("gone") == 3
    for leg in legs:
        (fail,) = leg.take()
        assert isinstance(fail, FailOut)
        assert fail.kind == "internal"


async def test_waiting_for_the_last_leg_has_a_deadline() -> None:
    """It ends when no leg is open, at once if none was, and says so when one still is."""
    streams = LegStreams(4)
    assert await streams.wait_empty(0.0)
    key = LegKey("last", 0)
    stream = streams.open(key)
    assert not await streams.wait_empty(0.01)
    assert streams.fail_all("This pod is stopping.", "draining") == 1
    failed = await stream.next(0.0)
    assert isinstance(failed, FailOut)
    assert failed.kind == "draining"
    asyncio.get_running_loop().call_soon(streams.close, key)
    assert await streams.wait_empty(5.0)
