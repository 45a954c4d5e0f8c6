"""SmolLM2 through prefill, decode and router: every greedy token is transformers' pick, cached, ferried or batched."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import aiohttp
import openai
import pytest

from kvferry_text.bundle import TextTools, load_text
from kvferry_wire import pod as wire_pod
from kvferry_wire.frames import End, Prefilled
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.processes.legs import decode_leg, frames, ids_of, make_leg
from tests.support.prompts import PROMPTS
from tests.support.reference import Reference, reference_for
from tests.support.service import Service, running_service

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(300)]

NAME = "smollm2-135m-instruct"
TOKENS = 12
BLOCK = 16
# Of every kind that the list has: questions, code, scripts, emoji, white space, numbers, long ones, a rendered chat.
CHOSEN = tuple(PROMPTS[index] for index in (0, 46, 5, 9, 12, 13, 19, 25, 28, 37, 45, 48, 49))


@pytest.fixture(scope="module")
def real_service(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    spec = {
        "model": {"name": NAME, "source": str(demo_model)},
        "engine": {
            "dtype": "float32",
            "blockSize": BLOCK,
            "maxModelLen": 1024,
            "kvBlocks": 300,
            "tokenBudget": 96,
            "threads": 1,
        },
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
        "router": {"auth": "none", "disaggregation": {"mode": "always"}},
    }
    with running_service(tmp_path_factory.mktemp("real"), spec) as service:
        yield service


@pytest.fixture
async def real_internal(real_service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    async with real_service.session() as session:
        await real_service.wait_ready(session)
        yield session
        await real_service.wait_idle(session, 3.0)


@pytest.fixture
def reference(demo_model: Path) -> Reference:
    return reference_for(demo_model)


@pytest.fixture
async def tools(real_service: Service, real_internal: aiohttp.ClientSession) -> TextTools:
    async with real_internal.get(real_service.url("decode-0") + "/internal/v1/text") as response:
        return load_text(wire_pod.decode_text(await response.read()), DEFAULT_LIMITS)


async def ferried(service: Service, session: aiohttp.ClientSession, prompt_ids: Sequence[int]) -> tuple[list[int], int]:
    """The answer's ids by a prefill and a decode leg, and how many prompt tokens were cached at prefill."""
    leg = make_leg(uuid.uuid4().hex, tuple(prompt_ids), model=NAME, max_tokens=TOKENS)
    *_, prefilled = await frames(service, session, "prefill-0", leg)
    assert isinstance(prefilled, Prefilled)
    if prefilled.handle is None:  # the first token ended it
        return list(prefilled.first), prefilled.cached_tokens
    found = await frames(service, session, "decode-0", decode_leg(leg, prefilled))
    end = found[-1]
    assert isinstance(end, End)
    assert end.recomputed == ""
    return [*prefilled.first, *ids_of(found)], prefilled.cached_tokens


class Official:
    """openai-python through the router: greedy completions, which must go the disaggregated way."""

    def __init__(self, service: Service) -> None:
        self._client = openai.AsyncOpenAI(base_url=service.url() + "/v1", api_key="none", max_retries=0)

    async def close(self) -> None:
        await self._client.close()

    async def whole(self, prompt: str) -> tuple[str, int]:
        """Text, and how many prompt tokens were cached."""
        raw = await self._client.completions.with_raw_response.create(
            model=NAME, prompt=prompt, max_tokens=TOKENS, temperature=0
        )
        assert raw.headers["x-kvferry-path"] == "disaggregated"
        answer = raw.parse()
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    async def streamed(self, prompt: str) -> str:
        stream = await self._client.completions.create(
            model=NAME, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True
        )
        assert stream.response.headers["x-kvferry-path"] == "disaggregated"
        return "".join([chunk.choices[0].text async for chunk in stream])


async def test_every_token_is_the_references(
    real_service: Service, real_internal: aiohttp.ClientSession, tools: TextTools, reference: Reference
) -> None:
    """B019, B089: ids by legs and text by the official client, new and cached, one at a time and all at once."""
    official = Official(real_service)
    prompts = [tools.tokenizer.encode(prompt, special=True, add_bos=tools.bundle.add_bos) for prompt in CHOSEN]
    half = len(CHOSEN) // 2
    # Half of the prompts come as legs first, the other half through the router; a few alone, the rest at once.
    new_ids = [await ferried(real_service, real_internal, ids) for ids in prompts[:2]]
    new_ids += await asyncio.gather(*(ferried(real_service, real_internal, ids) for ids in prompts[2:half]))
    new_texts = [await official.whole(prompt) for prompt in CHOSEN[half : half + 2]]
    new_texts += await asyncio.gather(*(official.whole(prompt) for prompt in CHOSEN[half + 2 :]))
    again_ids, again_texts, streamed_texts = await asyncio.gather(
        asyncio.gather(*(ferried(real_service, real_internal, ids) for ids in prompts)),
        asyncio.gather(*(official.whole(prompt) for prompt in CHOSEN)),
        asyncio.gather(*(official.streamed(prompt) for prompt in CHOSEN)),
    )
    await official.close()

    assert not any(cached for _, cached in (*new_ids, *new_texts))
    for index, (prompt_ids, (answer, _)) in enumerate(zip(prompts, again_ids, strict=True)):
        assert reference.judge_greedy(prompt_ids, answer) == [], CHOSEN[index]
        if index < half and new_ids[index][0] != answer:  # a pick within the margin went the other way
            assert reference.judge_greedy(prompt_ids, new_ids[index][0]) == [], CHOSEN[index]
        texts = {again_texts[index][0], streamed_texts[index]} | (
            {new_texts[index - half][0]} if index >= half else set()
        )
        for text in texts - {spoken(tools, answer)}:
            judge_text(tools, reference, prompt_ids, text)
        # Whole blocks, never the last token; the legs are another tenant's than the router's requests.
        whole_blocks = (len(prompt_ids) - 1) // BLOCK * BLOCK
        assert again_ids[index][1] == (whole_blocks if index < half else 0)
        assert index < half or again_texts[index][1] == whole_blocks
    assert len({tuple(answer) for answer, _ in again_ids}) > len(CHOSEN) // 2


def spoken(tools: TextTools, ids: Sequence[int]) -> str:
    """The text of an answer's ids, without what ends it."""
    ending = [index for index, token in enumerate(ids) if token in tools.bundle.eos_token_ids]
    return tools.tokenizer.decode(ids[: ending[0]] if ending else ids)


def judge_text(tools: TextTools, reference: Reference, prompt_ids: Sequence[int], text: str) -> None:
    """A text without known ids: those that it is tokenized to pass the oracle, or the reference says the very text."""
    answer = tools.tokenizer.encode(text, special=False, add_bos=False)
    if not answer or reference.judge_greedy(prompt_ids, answer):
        assert spoken(tools, reference.generate(prompt_ids, TOKENS)) == text
