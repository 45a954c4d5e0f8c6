"""A decode pod that is lost in the middle of an answer costs a pause: another one, or its next life, goes on."""

import asyncio
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import openai
import pytest

from kvferry_wire.limits import Limits

from .harness import LIMITS, Router, events, running, text_of, until
from .scripted_pod import Fault, Script, ScriptedPod
from .test_failing_pods_never_cut_an_answer_silently import (
    PROTOCOL,
    STREAM_FAULTS,
    assert_error_only,
    assert_idle,
    make_pods,
    read_all,
)

PROMPT = "the marker of this request, which is half an alphabet longer"
RESUMABLE = tuple(fault for fault in get_args(Fault) if fault in STREAM_FAULTS and fault not in PROTOCOL)


def limits(**changes: Any) -> Limits:
    return msgspec.structs.replace(LIMITS, **changes)


def comments(body: bytes) -> list[str]:
    return [block for block in body.decode().split("\n\n") if block.startswith(":")]


def check_stream(body: bytes, *, cause: str, prompt: str = PROMPT) -> None:
    """Whole, of one id and time, each character once, usage of one answer, and the end says what happened."""
    assert text_of(body) == prompt
    found = events(body)
    assert found[-1] == "[DONE]"
    documents = found[:-1]
    assert len({(document["id"], document["created"]) for document in documents}) == 1
    assert documents[-1]["usage"]["completion_tokens"] == len(prompt)
    assert documents[-1]["usage"]["prompt_tokens"] == len(prompt)
    finished = [choice["finish_reason"] for event in documents for choice in event["choices"]]
    assert finished[-1] == "length"
    assert set(finished[:-1]) == {None}
    assert comments(body) == [f": kvferry resumed: {cause}"]
    assert body.index(b": kvferry resumed") < body.index(b"data: [DONE]")


def streamed(router: Router, prompt: str = PROMPT, **fields: Any) -> Any:
    return router.complete(prompt, stream=True, stream_options={"include_usage": True}, **fields)


CAUSES = {"stall": "stalled", "cut": "dead", "cut_frame": "dead", "half_frame": "dead", "no_end": "dead"}
CAUSES |= {"internal": "failed", "invalid": "failed", "busy": "busy", "draining": "draining"}


@pytest.mark.parametrize("fault", RESUMABLE)
@pytest.mark.parametrize("role", ["split", "alone"])
async def test_another_pod_goes_on_with_a_stream(tmp_path: Path, fault: Fault, role: str) -> None:
    """With what was emitted as input; the lost leg is aborted by name; whoever read the metrics knows why."""
    p, first, second = make_pods("d1", "d2")
    for pod in (first, second):
        pod.scripts["decode"].append(Script(fault=fault, after=7))
    flags = () if role == "split" else ("--disaggregate", "never")
    async with running(tmp_path, p, first, second, flags=flags) as router:
        async with streamed(router) as response:
            body = await response.read()
            assert response.headers["x-kvferry-path"] == ("disaggregated" if role == "split" else "aggregated")
        # Each of the two fails once, in turn.
        check_stream(body, cause=", ".join([CAUSES[fault]] * 2))
        assert await router.metric("router_resumes_total", cause=CAUSES[fault]) == 2
        assert await router.metric("router_resume_gap_seconds_count") == 2
        legs = sorted((leg for pod in (first, second) for _, leg in pod.legs), key=lambda leg: leg.attempt)
        given = 1 if role == "split" else 0
        assert [len(leg.choices[0].emitted) for leg in legs] == [given, given + 7, given + 14]
        assert len({leg.compat_hash for leg in legs}) == 1
        if fault in ("stall", "cut", "cut_frame", "half_frame", "no_end"):
            lost = {(leg.internal_id, leg.attempt) for leg in legs[:2]}
            for pod in (first, second):
                await pod.wait_for(lambda pod=pod: len(pod.aborts) == 1)
            assert {(abort.internal_id, abort.attempt) for pod in (first, second) for abort in pod.aborts} == lost
        await assert_idle(router, p, first, second)
        assert await router.metric("router_resume_ids") == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_pod_that_fails_every_few_tokens_still_gives_the_whole_answer(tmp_path: Path, stream: bool) -> None:
    """Several deaths in one answer, all of the only pod: what each life gave counts."""
    p, d = make_pods("d1")
    d.default["decode"] = Script(fault="cut", after=9)
    async with running(tmp_path, p, d) as router:
        async with router.complete(
            PROMPT, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
        ) as response:
            body = await response.read()
            assert response.status == 200
        if stream:
            check_stream(body, cause=", ".join(["dead"] * 6))
        else:
            answer = json.loads(body)
            assert answer["choices"][0]["text"] == PROMPT
            assert answer["usage"]["completion_tokens"] == len(PROMPT)
        await assert_idle(router, p, d)


async def test_role_of_a_chat_is_said_once(tmp_path: Path) -> None:
    """The leg that goes on is told that the client has the role, and does not say it again."""
    first, second = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    for pod in (first, second):
        pod.scripts["decode"].append(Script(fault="cut", after=3))
    async with running(tmp_path, first, second) as router:
        async with router.chat("a few words", stream=True) as response:
            body = await response.read()
        found = events(body)
        assert found[-1] == "[DONE]"
        roles = [choice["delta"].get("role") for event in found[:-1] for choice in event["choices"]]
        assert [role for role in roles if role] == ["assistant"]
        assert [leg.format.role_sent for pod in (first, second) for _, leg in pod.legs].count(True) == 2


async def test_ten_streams_outlive_their_pod(tmp_path: Path) -> None:
    """The pod is killed under ten streams and comes back on its port: ten whole answers, and no error."""
    p, d = make_pods("d1")
    d.default["decode"] = Script(pause_s=0.02)
    begun: list[bytes] = []
    async with running(tmp_path, p, d, limits=limits(resume_wait_s=5.0, stall_timeout_s=5.0)) as router:

        async def one() -> bytes:
            async with streamed(router) as response:
                begun.append(first := await response.content.readany())
                body, broken = await read_all(response)
                assert not broken
                return first + body

        async def all_begun() -> bool:
            return len(begun) == 10

        tasks = [asyncio.create_task(one()) for _ in range(10)]
        await until(all_begun, 5.0)
        port = d.port
        await d.stop()
        await router.wait_ready(False)
        d.incarnation = bytes([1]) * 16
        await d.start(port)
        for body in await asyncio.gather(*tasks):
            check_stream(body, cause="dead")
        await assert_idle(router, p, d)


async def test_official_client_sees_a_pause_and_no_error(tmp_path: Path) -> None:
    """openai-python reads one answer, whatever happened behind it."""
    first, second = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    for pod in (first, second):
        pod.scripts["decode"].append(Script(fault="cut", after=5))
    async with running(tmp_path, first, second) as router:
        client = openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.completions.create(
                model="toy",
                prompt=PROMPT,
                max_tokens=len(PROMPT),
                stream=True,
                stream_options={"include_usage": True},
            )
            text = ""
            async for chunk in stream:
                text += "".join(choice.text for choice in chunk.choices)
            assert text == PROMPT
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens == len(PROMPT)


async def test_answer_that_loses_one_pod_after_the_other_without_a_token_is_given_up(tmp_path: Path) -> None:
    """A request that ends whatever computes it does not go round the whole pool: three pods, and its own error."""
    pods = [ScriptedPod(f"d{number}", "decode") for number in range(6)]
    for pod in pods:
        pod.default["decode"] = Script(fault="cut")
    async with running(tmp_path, *pods) as router:
        async with router.complete(PROMPT) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (500, "engine_lost_repeatedly")
        assert sum(len(pod.legs) for pod in pods) == 3
        assert await router.metric("router_gave_up_total", reason="barren") == 1
        await assert_idle(router, *pods)


async def test_pods_of_another_model_do_not_go_on_with_an_answer(tmp_path: Path) -> None:
    """Only a pod of the compat hash that the answer was begun with may; with none the stream ends in an error."""
    first, other = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode", compat="another")
    for pod in (first, other):
        pod.gone_after_fault = True
        pod.scripts["decode"].append(Script(fault="cut", after=5))
    async with running(tmp_path, first, other) as router:
        async with streamed(router) as response:
            body, broken = await read_all(response)
        assert broken
        assert_error_only(body)
        assert sorted(len(pod.legs) for pod in (first, other)) == [0, 1]
        assert await router.metric("router_gave_up_total", reason="no_pod") == 1


async def test_a_pod_with_a_longer_context_goes_on_with_an_answer(tmp_path: Path) -> None:
    """A rollout that changes only the context's length loses no answer: the pods have one text and one kind of KV."""
    old, new = ScriptedPod("d1", "decode", context=2 * len(PROMPT)), ScriptedPod("d2", "decode", context=2048)
    old.gone_after_fault = True
    old.scripts["decode"].append(Script(fault="cut", after=5))
    new.ready = False
    async with running(tmp_path, old, new, wait=False) as router:
        await router.wait_pods(1)
        async with streamed(router) as response:
            new.ready = True
            body, broken = await read_all(response)
        assert not broken
        assert text_of(body) == PROMPT
        assert [len(pod.legs) for pod in (old, new)] == [1, 1]


async def test_a_pod_without_room_for_the_whole_answer_does_not_go_on_with_it(tmp_path: Path) -> None:
    """It would end the answer early and call that its length: the stream ends in an error in its place."""
    old, short = ScriptedPod("d1", "decode", context=2048), ScriptedPod("d2", "decode", context=2 * len(PROMPT) - 1)
    old.gone_after_fault = True
    old.scripts["decode"].append(Script(fault="cut", after=5))
    async with running(tmp_path, old, short) as router:
        async with streamed(router) as response:
            body, broken = await read_all(response)
        assert broken
        assert_error_only(body)
        assert [len(pod.legs) for pod in (old, short)] == [1, 0]
        assert await router.metric("router_gave_up_total", reason="no_pod") == 1


async def test_ids_beyond_the_router_s_room_are_not_kept_and_the_answer_is_not_resumed(tmp_path: Path) -> None:
    """The cap holds for all answers together; one that is over it is answered as long as its pod lives."""
    first, second = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    async with running(tmp_path, first, second, limits=limits(resume_ids=20)) as router:
        async with streamed(router) as response:
            assert text_of(await response.read()) == PROMPT
        for pod in (first, second):
            pod.scripts["decode"].append(Script(fault="cut", after=30))
        async with streamed(router) as response:
            body, broken = await read_all(response)
        assert broken
        assert_error_only(body)
        assert PROMPT.startswith(text_of(body))
        assert await router.metric("router_gave_up_total", reason="memory") == 1
        assert await router.metric("router_resume_ids") == 0
