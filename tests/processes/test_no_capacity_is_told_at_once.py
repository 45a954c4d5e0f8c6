"""Without pods for a request, clients are told within a second, and when to come again; a wrong name is never that."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvferry_service.key_files import create_keys
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.processes.asking import said
from tests.runtime.server.harness import PodProcess, running_pod
from tests.support.router_process import RouterProcess, running_router
from tests.support.service import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

AT_ONCE_S = 1.0  # on a machine that has time; a busy one may take all but one of the tries longer
PROMPT = "a prompt that is long enough to be computed by prefill"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service") / "keys"
    create_keys(folder)
    return folder


@pytest.fixture(scope="module")
def engines(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, PodProcess]]:
    """One of each role."""
    folder = tmp_path_factory.mktemp("pods")
    with (
        running_pod(folder / "p", "--role", "prefill", keys=keys) as prefill,
        running_pod(folder / "d", "--role", "decode", keys=keys) as decode,
    ):
        yield {"prefill": prefill, "decode": decode}


@pytest.fixture
def router(keys: Path, tmp_path: Path) -> Iterator[RouterProcess]:
    with running_router(tmp_path, keys, "--disaggregate-min-tokens", "16") as router:
        yield router


@pytest.fixture
async def client(router: RouterProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def name(router: RouterProcess, engines: dict[str, PodProcess], *roles: str) -> None:
    router.name_pods(**{role: engines[role].ready() | {"role": role} for role in roles})


async def answer(client: openai.AsyncOpenAI, model: str = "toy") -> str:
    made = await client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    return made.choices[0].text


async def refusal(client: openai.AsyncOpenAI, *, chat: bool, stream: bool, model: str = "toy") -> openai.APIStatusError:
    """The error that the official client raises."""
    fields: Any = {"model": model, "max_tokens": 8, "stream": stream}
    with pytest.raises(openai.APIStatusError) as caught:
        if chat:
            await client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **fields)
        else:
            await client.completions.create(prompt=PROMPT, **fields)
    body: Any = caught.value.body
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    return caught.value


async def answered(client: openai.AsyncOpenAI, within_s: float = 10.0) -> str:
    """An answer, asked for as a client does that keeps to ``Retry-After``; nothing but 503 may come before it."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await answer(client)
        except openai.InternalServerError as error:
            assert error.status_code == 503, error
            assert time.monotonic() < deadline, error
            await asyncio.sleep(int(error.response.headers["Retry-After"]))


@pytest.mark.parametrize("roles", [(), ("prefill",)], ids=["no pod", "no decode pod"])
async def test_503_says_when_to_come_again(
    router: RouterProcess, engines: dict[str, PodProcess], client: openai.AsyncOpenAI, roles: tuple[str, ...]
) -> None:
    """Scaled to zero, and prefill without decode: 503 with Retry-After, streamed or not, chat or text."""
    name(router, engines, *roles)
    took = []
    for chat in (True, False):
        for stream in (True, False):
            begun = time.monotonic()
            error = await refusal(client, chat=chat, stream=stream)
            took.append(time.monotonic() - begun)
            assert error.status_code == 503
            assert 1 <= int(error.response.headers["Retry-After"]) <= 30
            assert error.code == "unavailable"
    assert min(took) < AT_ONCE_S
    assert max(took) < DEFAULT_LIMITS.queue_wait_s


@pytest.mark.parametrize("roles", [(), ("prefill",), ("decode",)], ids=["no pod", "no decode pod", "decode alone"])
async def test_an_unknown_model_is_404_whatever_there_is(
    router: RouterProcess, engines: dict[str, PodProcess], client: openai.AsyncOpenAI, roles: tuple[str, ...]
) -> None:
    """A client that asks for the wrong model would wait for ever for a 503 to pass."""
    name(router, engines, *roles)
    for chat in (True, False):
        error = await refusal(client, chat=chat, stream=False, model="gpt-4")
        assert (error.status_code, error.code) == (404, "model_not_found")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")


async def test_a_wrong_field_is_400_without_a_pod(router: RouterProcess, client: openai.AsyncOpenAI) -> None:
    """It would be wrong with pods as well: nobody is sent away to come again with it."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="toy", prompt=PROMPT, max_tokens=0)
    assert caught.value.param == "max_tokens"


async def test_decode_alone_answers(
    router: RouterProcess, engines: dict[str, PodProcess], client: openai.AsyncOpenAI
) -> None:
    """No prefill pod is no lack of capacity: the decode pod computes the prompt."""
    name(router, engines, "decode")
    assert await answered(client) == said(PROMPT, 8)


async def test_from_zero_and_back(
    router: RouterProcess, engines: dict[str, PodProcess], client: openai.AsyncOpenAI
) -> None:
    """While pods come one by one, a client that keeps to Retry-After gets its answer and never a 404 or 429."""
    asking = asyncio.create_task(answered(client, 30.0))
    await asyncio.sleep(0.5)
    name(router, engines, "prefill")
    await asyncio.sleep(0.5)
    name(router, engines, "prefill", "decode")
    assert await asking == said(PROMPT, 8)
    name(router, engines)

    async def still_there() -> str:
        try:
            return await answer(client)
        except openai.InternalServerError as error:
            assert error.status_code == 503, error
            return ""

    await until(still_there, 5.0)
