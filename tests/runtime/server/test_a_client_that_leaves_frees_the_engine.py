"""A client that leaves, at whatever stage, leaves no sequence, no block and no lease behind after a second."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from kvferry_wire.frames import Begun, Prefilled, Tokens
from tests.runtime.server.harness import (
    PodProcess,
    busy_with,
    frame_stream,
    frames,
    freed_within,
    load_of,
    make_leg,
    running_pod,
)

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def slow_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    """30 ms a step of at most 64 tokens, two sequences at a time, leases of 2 s."""
    folder = tmp_path_factory.mktemp("slow")
    flags = ("--kv-blocks", "255", "--max-running", "2", "--token-budget", "64", "--lease", "2")
    with running_pod(folder, *flags, model="toy:step_ms=30") as running:
        yield running


async def test_while_it_streams(slow_pod: PodProcess) -> None:
    """The connection closes after some tokens."""
    async with slow_pod.client() as client:
        async with aclosing(frame_stream(client, "generate", make_leg("a", sampling={"max_tokens": 900}))) as stream:
            for _ in range(3):
                assert isinstance(await anext(stream), (Begun, Tokens))
        await freed_within(client, 1.0)


async def test_while_its_prompt_is_computed_or_waits(slow_pod: PodProcess) -> None:
    """Two long prompts are being prefilled and two more wait; all four leave before a token."""
    async with slow_pod.client() as client:
        legs = [make_leg(f"b{i}", prompt=chr(65 + i) * 1000, sampling={"max_tokens": 5}) for i in range(4)]
        kinds = ("generate", "prefill", "generate", "generate")
        tasks = [asyncio.create_task(frames(client, kind, leg)) for kind, leg in zip(kinds, legs, strict=True)]
        await busy_with(client, 4)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await freed_within(client, 1.0)


async def test_before_its_openai_answer(slow_pod: PodProcess) -> None:
    """A client of ``/v1`` that gives up on a non-streaming answer stops the computation."""
    async with slow_pod.client() as client:
        body = {"model": "toy", "prompt": "hello", "max_tokens": 900}
        post = asyncio.create_task(client.post("/v1/completions", json=body))
        await busy_with(client, 1)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        await freed_within(client, 1.0)


async def test_a_delivered_lease_ends_by_its_own_time(slow_pod: PodProcess) -> None:
    """Nobody renews: the lease ends after its duration, not before, and its blocks return."""
    async with slow_pod.client() as client:
        (got,) = await frames(client, "prefill", make_leg("c", prompt="k" * 100))
        assert isinstance(got, Prefilled)
        await asyncio.sleep(1.0)
        assert (await load_of(client)).leases == 1
        await freed_within(client, 2.5)


async def test_many_legs_that_leave_at_random_moments(slow_pod: PodProcess) -> None:
    """Forty legs closed after 0 to 200 ms leave nothing; the engine is the same process."""
    engine_pid = slow_pod.engine_pid
    async with slow_pod.client() as client:

        async def visit(number: int) -> None:
            kind = "prefill" if number % 3 == 0 else "generate"
            leg = make_leg(f"d{number}", prompt=chr(60 + number) * (number * 7 + 1), sampling={"max_tokens": 50})
            try:
                async with asyncio.timeout(0.005 * number):
                    await frames(client, kind, leg)
            except TimeoutError:
                pass  # left early, as planned

        await asyncio.gather(*(visit(number) for number in range(40)))
        await freed_within(client, 4.0)  # prefill answers that arrived hold leases of 2 s
    assert slow_pod.engine_pid == engine_pid
    assert "Traceback" not in slow_pod.log.read_text()
