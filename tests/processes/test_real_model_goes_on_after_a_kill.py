"""SmolLM2: the decode pod is killed under the official client, and transformers judges what two pods wrote."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import openai
import pytest

from kvferry_text.bundle import TextTools, load_text
from kvferry_wire import pod as wire_pod
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.support.reference import Reference, reference_for
from tests.support.service import Pod, Service, running_service, until

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(300)]

NAME = "smollm2-135m-instruct"
TOKENS = 60
DECODE = cast("tuple[Pod, ...]", ("decode-0", "decode-1"))
PROMPTS = (
    "The old ferryman looked over the river and said that",
    "Here is a list of the planets of the solar system, with one sentence about each of them:",
    "def fibonacci(n):\n    ",
)


@pytest.fixture(scope="module")
def real_pool(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    spec = {
        "model": {"name": NAME, "source": str(demo_model)},
        "engine": {"dtype": "float32", "blockSize": 16, "maxModelLen": 512, "kvBlocks": 150, "threads": 1},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 2},
        "router": {"auth": "none", "disaggregation": {"mode": "always"}},
    }
    with running_service(tmp_path_factory.mktemp("real"), spec) as service:
        yield service


@pytest.fixture
async def tools(real_pool: Service) -> AsyncIterator[TextTools]:
    async with (
        real_pool.session() as session,
        session.get(real_pool.url("decode-0") + "/internal/v1/text") as response,
    ):
        yield load_text(wire_pod.decode_text(await response.read()), DEFAULT_LIMITS)


async def test_every_token_of_a_resumed_answer_is_the_references(
    real_pool: Service, demo_model: Path, tools: TextTools
) -> None:
    """Three streams over two decode pods, one pod killed in their midst: texts are whole and the reference's own."""
    texts = [""] * len(PROMPTS)

    async def read(index: int, client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(
            model=NAME, prompt=PROMPTS[index], max_tokens=TOKENS, temperature=0, stream=True
        )
        async for chunk in stream:
            texts[index] += "".join(choice.text for choice in chunk.choices)

    async def why_not_begun() -> str:
        return "" if all(len(text) > 15 for text in texts) else f"{texts}"

    async with openai.AsyncOpenAI(base_url=real_pool.url() + "/v1", api_key="none", max_retries=0) as client:
        tasks = [asyncio.create_task(read(index, client)) for index in range(len(PROMPTS))]
        await until(why_not_begun, 60)
        async with real_pool.session() as session:
            legs = {name: (await real_pool.metrics(session, name))["legs"] for name in DECODE}
            pod = max(legs, key=lambda name: legs[name])
            assert legs[pod] >= 1
            real_pool.signal(pod, "server", signal.SIGKILL)
            await asyncio.gather(*tasks)
            metrics = await real_pool.metrics(session)
    assert sum(value for series, value in metrics.items() if series.startswith("router_resumes_total")) >= legs[pod]
    reference = reference_for(demo_model)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        judge(tools, reference, prompt, text)


def judge(tools: TextTools, reference: Reference, prompt: str, text: str) -> None:
    """The ids that a text is tokenized to pass the oracle, or it is the very text that the reference says."""
    prompt_ids = tools.tokenizer.encode(prompt, special=True, add_bos=tools.bundle.add_bos)
    answer = tools.tokenizer.encode(text, special=False, add_bos=False)
    if not reference.judge_greedy(prompt_ids, answer):
        return
    said = reference.generate(prompt_ids, TOKENS)
    ending = [index for index, token in enumerate(said) if token in tools.bundle.eos_token_ids]
    assert text == tools.tokenizer.decode(said[: ending[0]] if ending else said)
