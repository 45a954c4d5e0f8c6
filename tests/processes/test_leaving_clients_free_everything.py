"""A client that leaves, at whatever stage of its request, leaves nothing behind at router, prefill and decode."""

import asyncio
import random
from typing import Any

import aiohttp
import msgspec
import pytest

from kvferry_wire.frames import Fail, Prefilled
from kvferry_wire.leg import AbortRequest, ChoiceState, Leg
from tests.processes.asking import Ask
from tests.processes.legs import frames, make_leg
from tests.support.service import Service, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

FREED_S = 1.0
SLACK_S = 0.5  # for a busy machine to be asked and to answer
LONG = "A prompt that is computed in many steps. " * 24  # about 16 steps of 64 tokens; a lease may hold 1280
STREAMS = pytest.mark.parametrize("stream", [True, False])


async def freed(service: Service, session: aiohttp.ClientSession) -> None:
    await service.wait_idle(session, FREED_S + SLACK_S)


async def leaves(url: str, ask: Ask, stage: "asyncio.Task[None]") -> None:
    """Ask, and close the connection at once when the stage is reached. The answer must not have ended by then."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:

        async def read() -> None:
            async with session.post(url + "/v1/completions", json=ask.body()) as response:
                await response.read()

        reading = asyncio.create_task(read())
        try:
            await asyncio.wait([reading, stage], return_when=asyncio.FIRST_COMPLETED)
            assert not reading.done(), "the answer ended before its client could leave"
            stage.result()
        finally:
            stage.cancel()
            reading.cancel()
            await asyncio.gather(reading, stage, return_exceptions=True)


def make_ask(mark: str, stream: bool, *, prompt: str = LONG, max_tokens: int = 400, n: int = 1) -> Ask:
    return Ask(f"{mark}, stream {stream}: {prompt}", max_tokens=max_tokens, n=n, stream=stream)


@STREAMS
async def test_while_prefill_computes(service: Service, internal: aiohttp.ClientSession, stream: bool) -> None:
    """Prefill has begun the prompt and is not done: it stops at its next step."""

    async def computing() -> None:
        await until(lambda: _load_is(service, internal, "prefill-0", running=1), 10.0)

    await leaves(service.url(), make_ask("prefill", stream), asyncio.create_task(computing()))
    await freed(service, internal)


@STREAMS
async def test_while_decode_writes(service: Service, internal: aiohttp.ClientSession, stream: bool) -> None:
    """Decode is at work, the lease has been released."""

    async def writing() -> None:
        await until(lambda: _load_is(service, internal, "decode-0", running=1), 10.0)

    await leaves(service.url(), make_ask("decode", stream), asyncio.create_task(writing()))
    await freed(service, internal)


async def test_at_the_first_byte(service: Service, internal: aiohttp.ClientSession) -> None:
    """The first token is sent before the transfer: whoever leaves at it leaves while KV is being pulled."""
    for number in range(5):
        ask = make_ask(f"first byte {number}", True, n=2)
        async with (
            aiohttp.ClientSession() as session,
            session.post(service.url() + "/v1/completions", json=ask.body()) as response,
        ):
            await response.content.readany()
            response.close()
        await freed(service, internal)


async def test_while_it_waits_for_its_turn(service: Service, internal: aiohttp.ClientSession) -> None:
    """More work than the pools hold: some are waiting in an engine when all clients leave at once."""

    async def waiting() -> None:
        await until(lambda: _load_is(service, internal, "decode-0", waiting=1), 20.0)

    stage = asyncio.create_task(waiting())
    asks = [make_ask(f"turn {number}", number % 2 == 0, max_tokens=500) for number in range(8)]
    async with asyncio.TaskGroup() as group:
        for ask in asks:
            group.create_task(leaves(service.url(), ask, stage))
    await freed(service, internal)


async def test_at_any_moment(service: Service, internal: aiohttp.ClientSession) -> None:
    """Many clients, each leaving at a moment of its own between the first byte it sends and the last it gets."""
    source = random.Random(31)

    async def one(number: int) -> None:
        ask = make_ask(f"moment {number}", source.random() < 0.5, prompt=LONG[:400])
        with_body = source.random() < 0.8
        await asyncio.sleep(source.uniform(0.0, 0.5))
        await _ask_and_leave(service.url(), ask, source.uniform(0.0, 1.2), with_body=with_body)

    for _ in range(2):
        await asyncio.gather(*(one(number) for number in range(16)))
        await freed(service, internal)


async def test_an_answer_of_prefill_that_is_of_no_use_is_taken_back(
    service: Service, internal: aiohttp.ClientSession
) -> None:
    """The leg is aborted by name after its answer was read: its lease ends then, not with its time."""
    leg = make_leg("of no use")
    (prefilled,) = await frames(service, internal, "prefill-0", leg)
    assert isinstance(prefilled, Prefilled)
    assert (await service.load(internal, "prefill-0")).leases == 1
    await _abort(service, internal, leg)
    await freed(service, internal)


async def test_a_handle_whose_decode_leg_was_aborted_is_taken_back(
    service: Service, internal: aiohttp.ClientSession
) -> None:
    """The abort overtakes the decode leg: it is refused, and aborting the prefill leg frees the lease."""
    leg = make_leg("overtaken")
    (prefilled,) = await frames(service, internal, "prefill-0", leg)
    assert isinstance(prefilled, Prefilled)
    second = msgspec.structs.replace(
        leg, attempt=1, handle=prefilled.handle, choices=(ChoiceState(emitted=prefilled.first),)
    )
    await _abort(service, internal, second, pod="decode-0")
    (refused,) = await frames(service, internal, "decode-0", second)
    assert isinstance(refused, Fail)
    assert refused.kind == "cancelled"
    await _abort(service, internal, leg)
    await freed(service, internal)


async def _abort(service: Service, session: aiohttp.ClientSession, leg: Leg, *, pod: Any = "prefill-0") -> None:
    body = msgspec.msgpack.encode(AbortRequest(internal_id=leg.internal_id, attempt=leg.attempt))
    async with session.post(service.url(pod) + "/internal/v1/abort", data=body) as response:
        assert response.status == 204


async def _load_is(service: Service, session: aiohttp.ClientSession, pod: Any, **least: int) -> str:
    """Empty when the engine has at least so much of each."""
    load = await service.load(session, pod)
    return "" if all(getattr(load, name) >= count for name, count in least.items()) else f"{pod}: {load}"


async def _ask_and_leave(url: str, ask: Ask, stay_s: float, *, with_body: bool) -> None:
    """Close the connection after so long, whether or not the answer has begun; without its body, if so wished."""
    host, port = url.removeprefix("http://").split(":")
    body = msgspec.json.encode(ask.body())
    sent = body if with_body else body[: len(body) // 2]
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + sent)
    await asyncio.sleep(stay_s)
    writer.transport.abort()
