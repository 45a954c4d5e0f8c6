"""Whatever is sent, the answer is a 4xx or a Fail that names the field; the engine's process stays the same."""

import asyncio
import io
import json
from typing import Any

import msgspec
import pytest

from kvferry_wire.frames import End, Fail, Prefilled
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.runtime.server.harness import PodProcess, frames, load_becomes, make_leg

pytestmark = pytest.mark.processes

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

BAD_BODIES: list[tuple[str, Any, str | None]] = [
    (CHAT, b"", None),
    (CHAT, b"{", None),
    (CHAT, b"[]", None),
    (CHAT, b'{"model":"toy","messages":[{"role":"user","content":"\xc3"}]}', None),
    (CHAT, b'{"a":' * 5000, None),
    (CHAT, {"messages": MESSAGES}, "model"),
    (CHAT, {"model": "toy"}, "messages"),
    (CHAT, {"model": "toy", "messages": []}, "messages"),
    (CHAT, {"model": "toy", "messages": "hi"}, "messages"),
    (CHAT, {"model": "toy", "messages": MESSAGES, "temperature": "hot"}, "temperature"),
    (CHAT, {"model": "toy", "messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"model": "toy", "messages": MESSAGES, "max_tokens": 10**30}, "max_tokens"),
    (CHAT, {"model": "toy", "messages": MESSAGES, "n": 9}, "n"),
    (CHAT, {"model": "toy", "messages": MESSAGES, "logit_bias": {"AI": -100}}, "logit_bias"),
    (CHAT, {"model": "toy", "messages": MESSAGES, "stop": ["x"] * 17}, "stop"),
    (TEXT, {"model": "toy", "prompt": ""}, "prompt"),
    (TEXT, {"model": "toy", "prompt": [-1]}, "prompt"),
    (TEXT, {"model": "toy", "prompt": [512]}, "prompt"),
    (TEXT, {"model": "toy", "prompt": [2147483648]}, "prompt"),
    (TEXT, {"model": "toy", "prompt": "x" * 3000}, "prompt"),
    (TEXT, {"model": "toy", "prompt": "x" * 1_500_000}, "prompt"),
]

BAD_LEGS: list[dict[str, Any]] = [
    {"prompt_ids": ()},
    {"prompt_ids": (-1,)},
    {"prompt_ids": (512,)},
    {"prompt_ids": (2**63,)},
    {"n": 0},
    {"n": 9},
    {"emitted": ((600,),)},
    {"internal_id": ""},
    {"internal_id": "x" * 200},
    {"attempt": -1},
    {"deadline_ms": 0},
    {"deadline_ms": -5},
    {"sampling": {"max_tokens": 0}},
    {"sampling": {"max_tokens": 2**62}},
    {"sampling": {"temperature": float("nan")}},
    {"sampling": {"temperature": -1.0}},
    {"sampling": {"top_p": 2.0}},
    {"sampling": {"seed": -1}},
    {"sampling": {"top_k": -3}},
    {"sampling": {"min_p": float("inf")}},
    {"sampling": {"stop": ("",)}},
    {"sampling": {"stop_token_ids": (9999,)}},
]


async def test_bad_openai_requests_are_refused_by_field(pod: PodProcess) -> None:
    """Each is a 4xx in OpenAI's shape that names its field; no engine restart; the next good one is answered."""
    engine_pid = pod.engine_pid
    async with pod.client() as client:
        for path, body, param in BAD_BODIES:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with client.post(path, data=io.BytesIO(data)) as response:
                error = (await response.json())["error"]
                assert 400 <= response.status < 500, (body, error)
                assert set(error) == {"message", "type", "param", "code"}
                if param is not None:
                    assert str(error["param"]).startswith(param), (body, error)
        async with client.post(CHAT, json={"model": "gpt-4", "messages": MESSAGES}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        async with client.post(TEXT, data=io.BytesIO(b"x" * (4 * 2**20 + 1))) as response:
            assert response.status == 413
        async with client.post(CHAT, json={"model": "toy", "messages": MESSAGES, "max_tokens": 1}) as response:
            assert response.status == 200
    assert pod.engine_pid == engine_pid


@pytest.mark.parametrize("kind", ["generate", "prefill"])
async def test_bad_legs_end_in_one_fail(pod: PodProcess, kind: str) -> None:
    """A leg that no engine can serve is refused by a frame of kind invalid or deadline, before the engine sees it."""
    engine_pid = pod.engine_pid
    async with pod.client() as client:
        for changes in BAD_LEGS:
            named = {"internal_id": f"bad-{kind}"} | changes
            (fail,) = await frames(client, kind, make_leg(**named))
            assert isinstance(fail, Fail), changes
            assert fail.kind in ("invalid", "deadline"), (changes, fail)
            assert fail.message
        assert isinstance((await frames(client, "generate", make_leg(f"good-{kind}")))[-1], End)
    assert pod.engine_pid == engine_pid


async def test_a_leg_whose_answer_has_no_room_is_left_to_another_pod(pod: PodProcess) -> None:
    """A generate leg is not begun where it could only be cut short; prefill computes no further than the prompt."""
    async with pod.client() as client:
        leg = make_leg("roomless", prompt_ids=(65,) * 2000, sampling={"max_tokens": 49})
        long = make_leg("too-long", prompt_ids=(65,) * 3000)
        for kind, given, told, whole in (
            ("generate", leg, "draining", "2049"),
            ("generate", long, "draining", "3016"),
            ("prefill", long, "invalid", "3000"),
        ):
            fail = (await frames(client, kind, given))[-1]
            assert isinstance(fail, Fail)
            assert (fail.kind, whole in fail.message, "2048" in fail.message) == (told, True, True), fail
        fits = make_leg("fits", prompt_ids=(65,) * 2000, sampling={"max_tokens": 48, "stop_token_ids": (0,)})
        assert isinstance((await frames(client, "generate", fits))[-1], End)
        # It fills the pod, where another test's prefill may still be under its lease.
        await load_becomes(client, lambda load: load.leases == 0, 2 * DEFAULT_LIMITS.lease_s)
        assert isinstance((await frames(client, "prefill", msgspec.structs.replace(leg, attempt=1)))[-1], Prefilled)


async def test_what_is_no_leg_is_400(pod: PodProcess) -> None:
    """Random bytes, another type, and a leg with a wrong field are named as such."""
    leg = msgspec.to_builtins(make_leg())
    bodies = [b"", b"\xff" * 100, msgspec.msgpack.encode([1]), msgspec.msgpack.encode(leg | {"attempt": "x"})]
    async with pod.client() as client:
        for body in bodies:
            for path in ("/internal/v1/generate", "/internal/v1/prefill", "/internal/v1/abort"):
                async with client.post(path, data=body) as response:
                    assert response.status == 400
                    assert (await response.json())["error"]["message"].startswith("Not a")


async def test_a_huge_text_delays_no_stream(pod: PodProcess) -> None:
    """While a text near the cap is refused, another client's stream has no gap of a second."""
    async with pod.client() as client:

        async def huge() -> int:
            body = {"model": "toy", "messages": [{"role": "user", "content": "a" * 900_000}]}
            async with client.post(CHAT, json=body) as response:
                return response.status

        async def stream() -> float:
            loop = asyncio.get_running_loop()
            worst, last = 0.0, loop.time()
            body = {"model": "toy", "prompt": "go", "max_tokens": 150, "stream": True}
            async with client.post(TEXT, json=body) as response:
                async for _ in response.content.iter_any():
                    worst, last = max(worst, loop.time() - last), loop.time()
            return worst

        status, gap = await asyncio.gather(huge(), stream())
    assert status == 400
    assert gap < 1.0
