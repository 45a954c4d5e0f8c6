"""kill -9 of a router between prefill's answer and decode: neither pod keeps anything of it, whatever the lease."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.runtime.server.harness import PodProcess, freed_within, load_of, running_pod, until_seen
from tests.support.router_process import RouterProcess, running_router

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

FREED_S = 2.0
PROMPT = "The router dies while decode has not yet heard of this prompt. " * 4


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[tuple[PodProcess, PodProcess]]:
    """(prefill, decode): only time would free what a minute's lease keeps."""
    flags = ("--lease", "60", "--kv-blocks", "127")
    with (
        running_pod(tmp_path / "p", "--role", "prefill", *flags) as prefill,
        running_pod(tmp_path / "d", "--role", "decode", *flags, keys=prefill.keys) as decode,
    ):
        yield prefill, decode


async def ask(router: RouterProcess, number: int) -> str:
    """What the client sees of a streamed answer."""
    body = {"model": "toy", "prompt": f"{number}: {PROMPT}", "max_tokens": 16, "stream": True}
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(router.url + "/v1/completions", json=body) as response,
        ):
            return (await response.read()).decode()
    except (aiohttp.ClientError, OSError) as error:
        return type(error).__name__


async def leases_reach(client: aiohttp.ClientSession, count: int) -> None:
    async def seen() -> bool:
        return (await load_of(client)).leases == count

    await until_seen(seen, 10.0)


async def test_prefill_keeps_no_lease_of_a_dead_router(pods: tuple[PodProcess, PodProcess], tmp_path: Path) -> None:
    """Three prompts are under leases while decode's server stands still; the kill frees them in two seconds."""
    prefill, decode = pods
    assert prefill.keys is not None
    async with prefill.client() as at_prefill, decode.client() as at_decode:
        with running_router(tmp_path / "r", prefill.keys, "--disaggregate-min-tokens", "32") as router:
            router.name_pods(p=prefill.ready() | {"role": "prefill"}, d=decode.ready() | {"role": "decode"})

            async def serves() -> bool:
                return "[DONE]" in await ask(router, 0)

            await until_seen(serves, 20.0)
            await freed_within(at_prefill, 2.0)
            os.kill(decode.pid, signal.SIGSTOP)
            try:
                asked = [asyncio.create_task(ask(router, number)) for number in (1, 2, 3)]
                await leases_reach(at_prefill, 3)
                router.kill()
                await freed_within(at_prefill, FREED_S)
            finally:
                os.kill(decode.pid, signal.SIGCONT)
            assert not any("[DONE]" in seen for seen in await asyncio.gather(*asked))
            await freed_within(at_decode, FREED_S)
            await freed_within(at_prefill, FREED_S)
