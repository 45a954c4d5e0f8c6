"""A pod whose grace is shorter than its answers: they go on elsewhere, or end in an explicit error; never falsely."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.processes.asking import Ask, ask_for, judge
from tests.processes.loose_pods import legs_of, router_of, running_pods
from tests.processes.streams import LONG, Stream
from tests.support.service import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

TOKENS = 500  # 5 s and more
GRACE_S = 0.5


async def test_an_answer_that_cannot_be_moved_ends_in_an_error(tmp_path: Path) -> None:
    """The only pod ends: when its grace is over, its answers are exact prefixes with an error; its exit status is 0.

    Streamed or not, nothing is ended cleanly, and nothing hangs.
    """
    asks = [Ask(f"nowhere {number}.{LONG}", TOKENS, stream=number % 2 == 0) for number in range(4)]
    with running_pods(tmp_path, 1, "--drain", str(GRACE_S)) as pods:
        async with (
            router_of(tmp_path, pods) as url,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client,
        ):
            tasks = [asyncio.create_task(ask_for(client, url, ask)) for ask in asks]
            await legs_of(pods[0], len(asks))
            await asyncio.sleep(0.3)
            pods[0].process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(pods[0].process.wait, GRACE_S + 5.0) == 0
            answers = [await task for task in tasks]
        for ask, answer in zip(asks, answers, strict=True):
            judge(ask, answer)
            assert not answer.ok
            assert answer.error is not None
            assert answer.status == (200 if ask.stream else 503)
            assert bool(answer.texts[0]) == ask.stream


@pytest.mark.parametrize("grace_s", [0.0, 0.2])
async def test_a_grace_too_short_for_the_move_costs_no_answer(tmp_path: Path, grace_s: float) -> None:
    """Another pod is there: with or without their KV, all answers go on there, and the pod that ends does so with 0."""
    with running_pods(tmp_path, 2, "--drain", str(grace_s)) as pods:
        async with (
            router_of(tmp_path, pods) as url,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client,
        ):
            streams = [Stream(Ask(f"short {number}.{LONG}", TOKENS)) for number in range(6)]
            tasks = [asyncio.create_task(stream.read(client, url)) for stream in streams]

            async def begun() -> str:
                return "" if all(stream.text for stream in streams) else "not every stream has begun"

            await until(begun, 20)
            legs = await legs_of(pods[0], 1)
            pods[0].process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(pods[0].process.wait, grace_s + 5.0) == 0
            for task in tasks:
                await task
        told = [comment for stream in streams for comment in stream.comments]
        resumed = [comment for comment in told if comment.startswith(": kvferry resumed: ")]
        assert len(resumed) >= legs
        # Of those that were to move: the pod with their KV may have ended before it was pulled.
        assert all(comment.startswith(": kvferry recomputed: ") for comment in told if comment not in resumed)
