"""An attached leg: the KV that it leaves is freed when its connection ends, unless a reader has taken it up before."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import aiohttp
import msgspec
import pytest

from kvferry_runtime.model.toy_oracle import toy_next_tokens
from kvferry_wire.frames import Alive, End, Frame, Handoff, Prefilled, Tokens
from kvferry_wire.leg import AbortRequest, ChoiceState, Leg
from tests.runtime.server.harness import (
    PodProcess,
    abort,
    busy_with,
    frame_stream,
    frames,
    freed_within,
    load_of,
    make_leg,
    running_pod,
)

pytestmark = pytest.mark.processes

MODEL = "toy:step_ms=20"


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PodProcess, PodProcess]]:
    """(prefill, decode): a lease that nobody takes up would last for a minute. Two decode sequences at a time."""
    folder = tmp_path_factory.mktemp("attached")
    with (
        running_pod(folder / "p", "--role", "prefill", "--lease", "60", model=MODEL) as prefill,
        running_pod(
            folder / "d",
            *("--role", "decode", "--lease", "60", "--max-running", "2"),
            model=MODEL,
            keys=prefill.keys,
        ) as decode,
    ):
        yield prefill, decode


def make_attached(name: str, **changes: object) -> Leg:
    return make_leg(name, prompt=f"{name}: a prompt of several blocks " * 3, attached=True, **changes)


def second_leg(leg: Leg, answer: Prefilled) -> Leg:
    choices = tuple(ChoiceState(emitted=(first,)) for first in answer.first)
    return msgspec.structs.replace(leg, handle=answer.handle, choices=choices, attempt=leg.attempt + 1)


async def answer_of(stream: AsyncIterator[Frame]) -> Prefilled:
    """The frame that names the lease; the stream stays open behind it."""
    async for frame in stream:
        if isinstance(frame, Prefilled):
            return frame
    raise AssertionError("the stream ended without an answer")


async def leases_of(client: aiohttp.ClientSession) -> int:
    return (await load_of(client)).leases


async def test_a_connection_that_ends_frees_its_lease(pods: tuple[PodProcess, PodProcess]) -> None:
    """As when a router dies between prefill's answer and the decode leg: at once, not when the lease is over."""
    async with pods[0].client() as prefill:
        async with aclosing(frame_stream(prefill, "prefill", make_attached("left"))) as stream:
            await answer_of(stream)
            assert await leases_of(prefill) == 1
        await freed_within(prefill, 1.0)


async def test_a_leg_that_is_not_attached_leaves_its_lease_behind(pods: tuple[PodProcess, PodProcess]) -> None:
    """Its stream ends with the answer; the lease is its reader's, or ends by its time or by name."""
    leg = make_leg("detached", prompt="of several blocks " * 3)
    async with pods[0].client() as prefill:
        assert isinstance((await frames(prefill, "prefill", leg))[-1], Prefilled)
        assert await leases_of(prefill) == 1
        await abort(prefill, leg)
        await freed_within(prefill, 1.0)


async def test_the_stream_shows_life_and_ends_when_a_reader_has_taken_the_lease_up(
    pods: tuple[PodProcess, PodProcess],
) -> None:
    """`Alive` while nobody has; then the end, the right answer, and nothing left on either side."""
    leg = make_attached("taken")
    async with pods[0].client() as prefill, pods[1].client() as decode:
        async with aclosing(frame_stream(prefill, "prefill", leg)) as stream:
            answer = await answer_of(stream)
            assert isinstance(await anext(stream), Alive)
            got = await frames(decode, "generate", second_leg(leg, answer))
            assert all([isinstance(frame, Alive) async for frame in stream])
        ids = [token for frame in got if isinstance(frame, Tokens) for token in frame.ids]
        assert ids == toy_next_tokens(leg.prompt_ids, 16)[1:]
        assert isinstance(got[-1], End) and got[-1].recomputed == ""
        await freed_within(prefill, 1.0)
        await freed_within(decode, 1.0)


async def test_a_reader_that_waits_for_its_turn_has_taken_the_lease_up(pods: tuple[PodProcess, PodProcess]) -> None:
    """Decode is full and renews: prefill's stream ends at once, and the KV is still there when the turn comes."""
    leg = make_attached("queued")
    busy = [make_leg(f"busy {number}", sampling={"max_tokens": 100}) for number in range(2)]
    async with pods[0].client() as prefill, pods[1].client() as decode:
        running = [asyncio.create_task(frames(decode, "generate", each)) for each in busy]
        await busy_with(decode, 2)
        async with aclosing(frame_stream(prefill, "prefill", leg)) as stream:
            answer = await answer_of(stream)
            waiting = asyncio.create_task(frames(decode, "generate", second_leg(leg, answer)))
            async with asyncio.timeout(1.0):
                assert all([isinstance(frame, Alive) async for frame in stream])
        assert not any(task.done() for task in running)
        got = await waiting
        assert isinstance(got[-1], End) and got[-1].recomputed == ""
        await asyncio.gather(*running)
        await freed_within(prefill, 1.0)
        await freed_within(decode, 1.0)


async def test_an_abort_by_name_ends_the_stream_and_the_lease(pods: tuple[PodProcess, PodProcess]) -> None:
    """As a router does that will not use the KV."""
    leg = make_attached("aborted")
    async with pods[0].client() as prefill:
        async with aclosing(frame_stream(prefill, "prefill", leg)) as stream:
            await answer_of(stream)
            await abort(prefill, leg)
            async with asyncio.timeout(1.0):
                assert all([isinstance(frame, Alive) async for frame in stream])
        await freed_within(prefill, 1.0)


async def test_the_kv_of_a_leg_that_moves_goes_with_its_connection_too(pods: tuple[PodProcess, PodProcess]) -> None:
    """`Handoff` is such an answer: whoever asked for it and dies leaves nothing on the draining pod."""
    leg = make_attached("moved", sampling={"max_tokens": 300})
    async with pods[1].client() as decode:
        async with aclosing(frame_stream(decode, "generate", leg)) as stream:
            async for frame in stream:
                if isinstance(frame, Tokens):
                    break
            body = msgspec.msgpack.encode(AbortRequest(internal_id=leg.internal_id, attempt=0))
            async with decode.post("/internal/v1/handoff", data=body) as response:
                assert response.status == 204
            async with asyncio.timeout(2.0):
                while not isinstance(await anext(stream), Handoff):
                    pass
            assert await leases_of(decode) == 1
        await freed_within(decode, 1.0)
