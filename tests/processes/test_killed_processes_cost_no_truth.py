"""kill -9 of each process of a service while clients ask: right answers or explicit errors, then service as before."""

import asyncio
import random
import signal

import aiohttp
import openai
import pytest

from tests.processes.asking import NAME, Ask, said
from tests.processes.conftest import LEASE_S
from tests.processes.traffic import Traffic
from tests.support.service import Part, Pod, Service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SETTLE_S = LEASE_S + 5.0  # leases whose reader died end with their time at the latest


async def killed(service: Service, session: aiohttp.ClientSession, seed: int, pod: Pod, part: Part) -> Traffic:
    """Kill it at a random moment under load, wait for its next life, and see answers of the usual kind again."""
    source = random.Random(seed)
    async with Traffic(service, seed) as traffic:
        await traffic.answered(5)
        await asyncio.sleep(source.uniform(0.0, 1.0))
        pid = service.signal(pod, part, signal.SIGKILL)
        await asyncio.sleep(0.5)
        await without_it(service, pod, f"{pod} {part}")
        await service.reborn(session, pod, part, pid)
        before = len(traffic.answers)
        await traffic.answered(20)
        later = [answer.path for _, answer in traffic.answers[before:] if answer.ok]
        assert "disaggregated" in later, later
    await service.wait_idle(session, SETTLE_S)
    return traffic


async def without_it(service: Service, pod: Pod, mark: str) -> None:
    """B116: while the only pod of a kind is gone, decode does the whole job, or the refusal is quick and clear."""
    ask = Ask(f"Meanwhile, without {mark}: a prompt that is long enough for the way.", stream=False)
    async with (
        aiohttp.ClientSession() as session,
        session.post(service.url() + "/v1/completions", json=ask.body()) as response,
    ):
        document = await response.json()
    if pod == "prefill-0":
        assert response.headers["x-kvferry-path"] == "aggregated"
        assert document["choices"][0]["text"] == ask.expected[0][0]
    else:
        assert (response.status, document["error"]["code"]) == (503, "unavailable")
        assert int(response.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("part", ["server", "engine"])
async def test_killed_prefill_costs_no_answer(service: Service, internal: aiohttp.ClientSession, part: Part) -> None:
    """Every request under way and every later one is answered in full; decode computes what it has to."""
    traffic = await killed(service, internal, 11, "prefill-0", part)
    assert not traffic.failed()


async def official_stream(service: Service) -> None:
    """openai-python raises where the answer is cut, after text that is a prefix of it."""
    text = ""
    async with openai.AsyncOpenAI(base_url=service.url() + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model=NAME, prompt="An answer that is cut.", max_tokens=1900, temperature=0, stream=True
        )
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                text += chunk.choices[0].text
    assert caught.value.code in ("engine_lost", "engine_failed")
    assert text
    assert said("An answer that is cut.", 1900).startswith(text)


@pytest.mark.parametrize("part", ["server", "engine"])
async def test_killed_decode_ends_answers_in_an_error(
    service: Service, internal: aiohttp.ClientSession, part: Part
) -> None:
    """What the client has is a prefix of the answer and the end is an error; prefill's blocks come back."""
    official = asyncio.create_task(official_stream(service))
    traffic = await killed(service, internal, 12, "decode-0", part)
    await official
    assert traffic.failed()
    cut = [answer for _, answer in traffic.failed() if answer.status == 200]
    assert cut, "no stream was under way"
