"""State streams over real CURVE sockets: the index follows them, and loss, silence and restarts cost hits only."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from kvferry_router.tenants import salter
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.hashing import chain_hashes
from kvferry_wire.state import BlocksRemoved, BlocksStored

from .harness import LIMITS, Router, running, until
from .scripted_pod import BLOCK_SIZE, KEYS, ScriptedPod, make_load

PROMPT = "a prompt of sixty-four bytes, which makes four blocks of sixteen"
assert len(PROMPT) == 4 * BLOCK_SIZE


def hashes(prompt: str = PROMPT) -> tuple[bytes, ...]:
    extras = KeyExtras(tenant_salt=salter(KEYS.hash)("default"))
    return tuple(chain_hashes(KEYS.hash, list(prompt.encode()), BLOCK_SIZE, extras))


async def cached(router: Router, pod: str, prompt: str = PROMPT) -> float:
    """Cached tokens of the prompt at a pod, as the newest decision saw them."""
    async with router.complete(prompt, max_tokens=1) as response:
        assert response.status == 200
    scores = (await router.decisions())[0]["scores"]
    for score in [*scores["alone"], *scores.get("prefill", [])]:
        if score["pod"] == pod:
            return float(score["formula"].partition("cached_tokens ")[2].partition(",")[0].rstrip(")"))
    raise AssertionError(f"{pod} was no candidate: {scores}")


async def wait_cached(router: Router, pod: str, tokens: float, prompt: str = PROMPT) -> None:
    async def same() -> bool:
        return await cached(router, pod, prompt) == tokens

    await until(same, 4.0)


async def test_index_follows_the_stream(tmp_path: Path) -> None:
    """Blocks stored before and after the join count, removed ones do not, and the holder is chosen."""
    d1, d2 = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    async with AsyncExitStack() as stack:
        for pod in (d1, d2):
            await stack.enter_async_context(pod.stream())
        d1.hashes = list(hashes()[:2])
        router = await stack.enter_async_context(running(tmp_path, d1, d2))
        await d1.subscribed()
        await d1.publish(make_load())
        await wait_cached(router, "d1", 32)
        await d1.publish(BlocksStored(hashes=hashes()[2:], parent=hashes()[1]))
        await wait_cached(router, "d1", 63)  # never the last token
        before = len(d1.legs)
        for _ in range(5):
            await cached(router, "d1")
        assert len(d1.legs) == before + 5

        async def shown() -> bool:
            return await router.metric("router_index_blocks") == len(hashes())

        await until(shown, 1.0)
        await d1.publish(BlocksRemoved(hashes=hashes()[1:2]))
        await wait_cached(router, "d1", 16)
        assert await cached(router, "d1", "another prompt of more than one block") == 0


async def test_gap_is_noticed_counted_and_healed(tmp_path: Path) -> None:
    """Two lost messages: the next one joins again, from a snapshot that has them."""
    d = ScriptedPod("d1", "decode")
    d.hashes = list(hashes()[:1])
    async with d.stream(), running(tmp_path, d) as router:
        await d.subscribed()
        await d.publish(make_load())
        await wait_cached(router, "d1", 16)  # joined
        for block in hashes()[1:3]:
            d.hashes.append(block)
            await d.publish(BlocksStored(hashes=(block,), parent=None), lose=True)
        await d.publish(make_load(waiting=1))
        await wait_cached(router, "d1", 48)
        assert await router.metric("router_state_rejoins_total", reason="gap") == 1


async def test_restart_voids_the_entries_and_silence_only_hides_them(tmp_path: Path) -> None:
    """Silence: no hits, still used. A new incarnation: what the old one had is gone for good."""
    d = ScriptedPod("d1", "decode")
    d.hashes = list(hashes())
    limits = msgspec.structs.replace(LIMITS, state_silence_s=0.5)
    async with d.stream(), running(tmp_path, d, limits=limits) as router:
        await d.subscribed()

        async def speak(event: Any = None) -> None:
            await d.publish(event or make_load())

        await speak()
        await wait_cached(router, "d1", 63)
        await asyncio.sleep(limits.state_silence_s + 0.1)
        assert await cached(router, "d1") == 0
        await speak()
        await wait_cached(router, "d1", 63)
        d.incarnation, d.sequence, d.hashes = bytes([9]) * 16, 0, []
        await speak()
        await wait_cached(router, "d1", 0)
        assert await router.metric("router_state_rejoins_total", reason="incarnation") == 1


async def test_forged_events_from_outside_the_service_change_nothing(tmp_path: Path) -> None:
    """A stream under another key is never heard; the pod is used without it."""
    d = ScriptedPod("d1", "decode")
    d.hashes = list(hashes())
    async with d.stream(key=b"f" * 32), running(tmp_path, d) as router:
        await asyncio.sleep(0.1)  # longer than a subscription takes that is let in
        for _ in range(5):
            await d.publish(make_load())
        assert await cached(router, "d1") == 0
