"""Prefill is lost between its answer and the pull: decode computes the prompt again, says why, and counts it once."""

import asyncio
import os
import signal
from collections.abc import Mapping

import aiohttp
import pytest

from kvferry_runtime.model.toy_oracle import toy_next_tokens
from kvferry_wire.frames import End, Frame, Prefilled
from kvferry_wire.leg import Leg
from tests.processes.asking import SPEC
from tests.processes.conftest import LEASE_S
from tests.processes.legs import decode_leg, frames, ids_of, make_leg
from tests.support.service import Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

TOKENS = 16
MOST_LEASED = 12  # prompts of this size that fit under leases together


async def prefilled_leg(service: Service, session: aiohttp.ClientSession, name: str) -> Leg:
    """A decode leg whose KV prefill keeps."""
    leg = make_leg(name, max_tokens=TOKENS)
    (prefilled,) = await frames(service, session, "prefill-0", leg)
    assert isinstance(prefilled, Prefilled)
    assert prefilled.handle is not None
    return decode_leg(leg, prefilled)


def check(leg: Leg, found: list[Frame], reasons: set[str]) -> None:
    """The oracle's tokens, and one of these reasons why they were computed here; none: the KV was ferried."""
    expected = toy_next_tokens(leg.prompt_ids, TOKENS, SPEC)
    assert [*leg.choices[0].emitted, *ids_of(found)] == expected
    end = found[-1]
    assert isinstance(end, End)
    assert end.recomputed in (reasons or {""})


def lease_of(leg: Leg) -> int:
    assert leg.handle is not None
    return leg.handle.lease_id


async def counts(service: Service, session: aiohttp.ClientSession) -> dict[str, float]:
    """Of decode: pulls that went well, pulls that failed, prompts computed again (by reason)."""
    # The engine's own figures come with its next heartbeat.
    await asyncio.sleep(0.6)
    metrics = await service.metrics(session, "decode-0")
    names = ("kv_pulls_ok_total", "kv_pulls_failed_total", "kv_recomputed_total")
    return {series: value for series, value in metrics.items() if series.split("{")[0] in names}


def moved(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {series: value - before.get(series, 0) for series, value in after.items() if value != before.get(series, 0)}


async def test_killed_before_the_pull(service: Service, internal: aiohttp.ClientSession) -> None:
    """The peer is dead: recomputed. Its next life does not know the lease, though the same ids are granted anew."""
    first, second = [await prefilled_leg(service, internal, f"killed {number}") for number in range(2)]
    before = await counts(service, internal)
    pid = service.signal("prefill-0", "engine", signal.SIGKILL)
    found = await frames(service, internal, "decode-0", first)
    check(first, found, {"peer_dead", "connect", "read_error"})  # a killed process's sockets close a moment later
    reason = found[-1].recomputed if isinstance(found[-1], End) else ""
    assert moved(before, await counts(service, internal)) == {
        f'kv_pulls_failed_total{{reason="{reason}"}}': 1,
        f'kv_recomputed_total{{reason="{reason}"}}': 1,
    }

    await service.reborn(internal, "prefill-0", "engine", pid)
    others: list[Leg] = []
    while not others or lease_of(others[-1]) < lease_of(second):
        others.append(await prefilled_leg(service, internal, f"later life {len(others)}"))
        if len(others) > MOST_LEASED:
            break
    check(second, await frames(service, internal, "decode-0", second), {"lease_unknown"})
    # What those ids stand for now is untouched.
    check(others[-1], await frames(service, internal, "decode-0", others[-1]), set())


async def test_stopped_before_the_pull(service: Service, internal: aiohttp.ClientSession) -> None:
    """A peer that is silent is given up in bounded time; when it goes on, the next pull succeeds."""
    leg = await prefilled_leg(service, internal, "stopped")
    before = await counts(service, internal)
    pid = service.signal("prefill-0", "engine", signal.SIGSTOP)
    try:
        async with asyncio.timeout(12):
            found = await frames(service, internal, "decode-0", leg)
    finally:
        os.kill(pid, signal.SIGCONT)
    check(leg, found, {"peer_dead", "connect", "read_error", "deadline", "lease_expired"})
    assert sorted(moved(before, await counts(service, internal)).values()) == [1, 1]
    leg = await prefilled_leg(service, internal, "goes on")
    check(leg, await frames(service, internal, "decode-0", leg), set())


async def test_lease_that_ended_before_the_pull(service: Service, internal: aiohttp.ClientSession) -> None:
    """What nobody reads is kept for its time and no longer; who comes later does not read blocks that are others'."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    leg = await prefilled_leg(service, internal, "too late")
    await service.wait_idle(internal, LEASE_S + 1.0)
    assert loop.time() - begun > LEASE_S
    other = await prefilled_leg(service, internal, "others' by now")
    check(leg, await frames(service, internal, "decode-0", leg), {"lease_expired"})
    check(other, await frames(service, internal, "decode-0", other), set())


async def test_prefill_goes_on_while_decode_is_dead(service: Service, internal: aiohttp.ClientSession) -> None:
    """Leases of a dead reader end with their time; until then new prefills are answered or told that it is busy."""
    names = [f"dead reader {number}" for number in range(8)]
    await asyncio.gather(*(prefilled_leg(service, internal, name) for name in names))
    pid = service.signal("decode-0", "server", signal.SIGKILL)
    answers = await asyncio.gather(
        *(frames(service, internal, "prefill-0", make_leg(f"meanwhile {number}")) for number in range(30))
    )
    kinds = {getattr(answer[-1], "kind", "prefilled") for answer in answers}
    assert kinds <= {"prefilled", "busy"}
    await service.reborn(internal, "decode-0", "server", pid)
    await service.wait_idle(internal, LEASE_S + 2.0)
