"""All pods of a service are gone for good: clients are told so, as HTTP and the official client have it."""

import asyncio
import signal
import time
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.processes.asking import NAME, said
from tests.processes.loose_pods import legs_of, router_of, running_pods
from tests.processes.streams import LONG
from tests.support.service import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

AT_ONCE_S = 2.0  # of which a busy machine has one


async def test_both_decode_pods_die(tmp_path: Path) -> None:
    """In mid-stream: an exact prefix, one error event, no finish reason, and openai-python raises.

    Afterwards, before a first byte: a real 503 with Retry-After, as an error object, within a second.
    """
    prompt = f"Nobody is left.{LONG}"
    with running_pods(tmp_path, 2) as pods:
        async with (
            router_of(tmp_path, pods) as url,
            openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=30) as client,
            aiohttp.ClientSession() as session,
        ):
            text: list[str] = []
            finish: list[str | None] = []
            body = {"model": NAME, "prompt": prompt, "max_tokens": 800, "temperature": 0, "stream": True}

            async def official() -> None:
                stream = await client.completions.create(**body)  # type: ignore[call-overload]
                async for chunk in stream:
                    text.extend(choice.text for choice in chunk.choices)
                    finish.extend(choice.finish_reason for choice in chunk.choices)

            raw = b""

            async def as_it_is() -> None:
                nonlocal raw
                async with session.post(url + "/v1/completions", json=body) as response:
                    async for part in response.content.iter_any():
                        raw += part

            tasks = [asyncio.create_task(official()), asyncio.create_task(as_it_is())]

            async def begun() -> str:
                return "" if len(text) > 20 and raw.count(b"data:") > 20 else "the streams have not begun"

            await until(begun, 20)
            assert [await legs_of(pod, 1) for pod in pods] == [1, 1]
            for pod in pods:
                pod.process.send_signal(signal.SIGKILL)
            with pytest.raises(openai.APIError):
                await tasks[0]
            with pytest.raises(aiohttp.ClientPayloadError):
                await tasks[1]
            assert said(prompt, 800).startswith("".join(text))
            assert set(finish) == {None}
            assert raw.count(b'"error"') == 1
            assert b"[DONE]" not in raw
            asked_at = time.monotonic()
            async with session.post(url + "/v1/completions", json=body) as refused:
                assert time.monotonic() - asked_at < AT_ONCE_S
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) >= 1
                assert (await refused.json())["error"]["code"] == "unavailable"
            with pytest.raises(openai.InternalServerError, match="503"):
                await client.completions.create(**body)  # type: ignore[call-overload]
