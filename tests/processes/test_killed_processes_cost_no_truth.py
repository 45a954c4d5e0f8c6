"""kill -9 of each process of a service while clients ask: answers that had begun go on, then service as before."""

import asyncio
import random
import signal

import aiohttp
import openai
import pytest

from tests.processes.asking import NAME, Ask, said
from tests.processes.conftest import LEASE_S
from tests.processes.traffic import Traffic
from tests.support.service import Part, Pod, Service, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SETTLE_S = LEASE_S + 5.0  # leases whose reader died end with their time at the latest


async def seen_dead(service: Service, session: aiohttp.ClientSession, role: str) -> None:
    """Until the router gives no request to a role whose only pod was killed."""

    async def why_not() -> str:
        metrics = await service.metrics(session)
        used = sum(
            metrics[series] for series in metrics if series.startswith(f'router_pods{{role="{role}",state="ready"')
        )
        return f"the router uses {used:g} pods" if used else ""

    await until(why_not, 5.0)


async def without_it(service: Service, pod: Pod, mark: str) -> None:
    """B116: while the only pod of a kind is gone, decode does the whole job, or the refusal is quick and clear."""
    ask = Ask(f"Meanwhile, without {mark}: a prompt that is long enough for the way.", stream=False)
    async with (
        aiohttp.ClientSession() as session,
        session.post(service.url() + "/v1/completions", json=ask.body()) as response,
    ):
        document = await response.json()
    if pod == "prefill-0":
        assert response.headers["x-kvferry-path"] in ("aggregated", "recomputed")
        assert document["choices"][0]["text"] == ask.expected[0][0]
    else:
        assert (response.status, document["error"]["code"]) == (503, "unavailable")
        assert int(response.headers["Retry-After"]) >= 1


async def official_stream(service: Service, begun: asyncio.Event) -> None:
    """openai-python sees a pause: the text is whole, of one id, and its usage is that of one answer."""
    prompt, text, ids = "An answer whose pod is killed.", "", set()
    async with openai.AsyncOpenAI(base_url=service.url() + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model=NAME,
            prompt=prompt,
            max_tokens=600,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            ids.add((chunk.id, chunk.created))
            begun.set()
    assert text == said(prompt, 600)
    assert len(ids) == 1
    assert chunk.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (len(prompt), 600)


@pytest.mark.parametrize(("prefill_part", "decode_part"), [("server", "engine"), ("engine", "server")])
async def test_kill_prefill_then_decode(
    service: Service, internal: aiohttp.ClientSession, prefill_part: Part, decode_part: Part
) -> None:
    """The death of prefill costs no answer, that of decode none that has begun: its next life goes on with each.

    Both come back, and answers are as usual again; at rest nothing is held, by whichever life.
    """
    source = random.Random(f"{prefill_part} {decode_part}")
    async with Traffic(service, 11) as traffic:
        await traffic.answered(5)
        await asyncio.sleep(source.uniform(0.0, 1.0))
        prefill = service.signal("prefill-0", prefill_part, signal.SIGKILL)
        await seen_dead(service, internal, "prefill")
        await without_it(service, "prefill-0", f"prefill's {prefill_part}")
        await traffic.answered(15)
        assert not traffic.failed()

        begun = asyncio.Event()
        official = asyncio.create_task(official_stream(service, begun))
        async with asyncio.timeout(20):
            await begun.wait()
        await asyncio.sleep(source.uniform(0.0, 1.0))
        decode = service.signal("decode-0", decode_part, signal.SIGKILL)
        await seen_dead(service, internal, "decode")
        await without_it(service, "decode-0", f"decode's {decode_part}")
        await official
        await service.reborn(internal, "prefill-0", prefill_part, prefill)
        await service.reborn(internal, "decode-0", decode_part, decode)
        assert [answer.error for _, answer in traffic.failed() if answer.status == 200] == []
        resumed = await service.metrics(internal)
        assert sum(value for series, value in resumed.items() if series.startswith("router_resumes_total")) > 0
        failed, before = len(traffic.failed()), len(traffic.answers)
        await traffic.answered(20)
        assert len(traffic.failed()) == failed
        assert "disaggregated" in [answer.path for _, answer in traffic.answers[before:]]
    await service.wait_idle(internal, SETTLE_S)
