"""A real pod answers legs and OpenAI requests with the toy model's exact tokens."""

import asyncio
import json
from pathlib import Path

import pytest

from kvferry_runtime.model.toy_oracle import toy_next_tokens
from kvferry_wire import pod as wire_pod
from kvferry_wire.frames import End, Fail, Prefilled, Tokens
from tests.runtime.server.harness import (
    PodProcess,
    abort,
    busy_with,
    frame_stream,
    frames,
    load_becomes,
    load_of,
    make_leg,
)

pytestmark = pytest.mark.processes


async def test_a_generate_leg_streams_the_oracles_tokens_and_one_end(pod: PodProcess) -> None:
    """Ids, text and the end agree with the toy oracle."""
    leg = make_leg("plain")
    async with pod.client() as client:
        got = await frames(client, "generate", leg)
    expected = toy_next_tokens(leg.prompt_ids, 16)
    assert [token for frame in got if isinstance(frame, Tokens) for token in frame.ids] == expected
    end = got[-1]
    assert isinstance(end, End)
    assert (end.finish, end.completion_tokens) == (("length",), 16)
    assert end.data.endswith(b"data: [DONE]\n\n")
    assert sum(isinstance(frame, (End, Fail)) for frame in got) == 1


async def test_a_prefill_leg_gives_the_first_token_and_a_lease(pod: PodProcess) -> None:
    """The handle names the lease; the first token is the oracle's; the lease keeps blocks until it is given up."""
    leg = make_leg("prefill", prompt="p" * 40)
    async with pod.client() as client:
        (got,) = await frames(client, "prefill", leg)
        assert isinstance(got, Prefilled)
        assert got.handle is not None
        assert got.first == tuple(toy_next_tokens(leg.prompt_ids, 1))
        assert got.handle.token_count == 40
        load = await load_of(client)
        assert (load.leases, load.total_blocks - load.free_blocks) == (1, 3)


async def test_a_leg_that_has_ended_already_answers_end_alone(pod: PodProcess) -> None:
    """Emitted ids that reach max_tokens leave nothing to compute."""
    leg = make_leg("over", emitted=((65, 66),), sampling={"max_tokens": 2})
    async with pod.client() as client:
        (end,) = await frames(client, "generate", leg)
    assert isinstance(end, End)
    assert b"AB" in end.data


async def test_a_stop_string_ends_its_choice_and_frees_the_engine(pod: PodProcess) -> None:
    """The text stops before the string, the engine drops the rest of the choice."""
    leg = make_leg("stop", sampling={"max_tokens": 500})
    text = bytes(toy_next_tokens(leg.prompt_ids, 12)).decode()
    leg = make_leg("stop", sampling={"max_tokens": 500, "stop": (text[8:11],)})
    async with pod.client() as client:
        got = await frames(client, "generate", leg)
        # Another test's lease may still be held.
        await load_becomes(client, lambda load: (load.running, load.waiting) == (0, 0), 1.0)
    end = got[-1]
    assert isinstance(end, End)
    assert end.finish == ("stop",)
    sent = b"".join(frame.data for frame in got if isinstance(frame, (Tokens, End)))
    shown = "".join(
        event["choices"][0]["text"]
        for line in sent.decode().splitlines()
        if line.startswith("data: {") and (event := json.loads(line[6:]))["choices"]
    )
    assert shown == text[:8]


async def test_two_requests_with_one_request_id_both_complete(pod: PodProcess) -> None:
    """A client's own id names nothing inside; both get it back."""

    async def ask(client: object) -> tuple[str, str]:
        body = {"model": "toy", "prompt": "same", "max_tokens": 60, "temperature": 0}
        async with client.post("/v1/completions", json=body, headers={"x-request-id": "twin"}) as response:  # type: ignore[attr-defined]
            assert response.status == 200
            return response.headers["x-request-id"], (await response.json())["choices"][0]["text"]

    async with pod.client() as client:
        first, second = await asyncio.gather(ask(client), ask(client))
    assert first == second
    assert first[0] == "twin"
    assert len(first[1]) == 60


async def test_a_second_leg_of_a_running_name_is_refused(pod: PodProcess) -> None:
    """The first one goes on undisturbed."""
    leg = make_leg("named", sampling={"max_tokens": 300})
    async with pod.client() as client:
        running = asyncio.create_task(frames(client, "generate", leg))
        await busy_with(client, 1)
        (refused,) = await frames(client, "generate", leg)
        assert isinstance(refused, Fail)
        assert refused.kind == "invalid"
        assert isinstance((await running)[-1], End)


async def test_an_abort_by_name_ends_a_leg_and_stops_a_later_one(pod: PodProcess) -> None:
    """``abort`` is idempotent and leaves a tombstone for exactly this attempt."""
    async with pod.client() as client:
        leg = make_leg("gone", sampling={"max_tokens": 500})
        running = asyncio.create_task(frames(client, "generate", leg))
        await busy_with(client, 1)
        await abort(client, leg)
        await abort(client, leg)
        last = (await running)[-1]
        assert isinstance(last, Fail)
        assert last.kind == "cancelled"
        await abort(client, make_leg("gone", attempt=1))
        for kind in ("generate", "prefill"):
            (late,) = await frames(client, kind, make_leg("gone", attempt=1))
            assert isinstance(late, Fail)
            assert late.kind == "cancelled"
        assert isinstance((await frames(client, "generate", make_leg("gone", attempt=2)))[-1], End)


async def test_a_slow_reader_holds_up_nobody(pod: PodProcess) -> None:
    """A client that reads nothing leaves others their pace; its own answer waits for it, whole."""
    async with pod.client() as client:
        slow = frame_stream(client, "generate", make_leg("slow", sampling={"max_tokens": 300}))
        await anext(slow)
        others = [frames(client, "generate", make_leg(f"fast-{i}")) for i in range(8)]
        async with asyncio.timeout(5):
            assert all(isinstance(got[-1], End) for got in await asyncio.gather(*others))
        rest = [frame async for frame in slow]
        assert isinstance(rest[-1], End)


async def test_info_and_text_describe_the_pod(pod: PodProcess) -> None:
    """Ports, limits and digests are those of the running engine."""
    async with pod.client() as client:
        async with client.get("/internal/v1/info") as response:
            info = wire_pod.decode_info(await response.read())
        async with client.get("/internal/v1/text") as response:
            bundle = wire_pod.decode_text(await response.read())
        async with client.get("/v1/models") as response:
            models = await response.json()
    ready = pod.ready()
    assert (info.ports.http, info.ports.control) == (ready["http"], ready["control"])
    assert info.incarnation == ready["incarnation"]
    assert info.text_digest == bundle.digest
    assert info.max_model_len == 2048
    assert info.total_blocks == 255
    assert info.transfer_backends["tcp"] == "ok"
    assert models["data"][0]["id"] == "toy"


def test_the_server_holds_no_torch_and_the_engine_no_text(pod: PodProcess) -> None:
    """The API server maps no library of torch, the EngineCore none of the tokenizer."""
    server = Path(f"/proc/{pod.pid}/maps").read_text()
    engine = Path(f"/proc/{pod.engine_pid}/maps").read_text()
    assert "libtorch" not in server
    assert "libtorch" in engine
    assert "tokenizers" not in engine


async def test_metrics_count_what_was_served(pod: PodProcess) -> None:
    """Prompt and generated tokens of an answer appear once."""

    async def figures(client: object) -> dict[str, float]:
        async with client.get("/metrics") as response:  # type: ignore[attr-defined]
            lines = (await response.text()).splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    async with pod.client() as client:
        before = await figures(client)
        await frames(client, "generate", make_leg("counted", prompt="x" * 10))
        after = await figures(client)

    def moved(name: str) -> float:
        return after[name] - before[name]

    assert moved("kvferry:prompt_tokens_total") == 10
    assert moved("kvferry:generation_tokens_total") == 16
    assert moved('kvferry:request_success_total{finished_reason="length"}') == 1
    assert moved("kvferry:time_to_first_token_seconds_count") == 1
