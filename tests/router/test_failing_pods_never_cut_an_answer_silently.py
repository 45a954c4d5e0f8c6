"""Each way a pod can fail, on the wire: another pod, or an error that nobody can take for a right end."""

import asyncio
import json
from pathlib import Path
from typing import get_args

import aiohttp
import openai
import pytest

from .harness import LIMITS, Router, events, running, text_of
from .scripted_pod import Fault, Script, ScriptedPod

PROMPT = "the marker of this request"
FAULTS: tuple[Fault, ...] = get_args(Fault)
# On a leg that has begun to answer: those that are no status of the whole response.
STREAM_FAULTS = tuple(
    fault for fault in FAULTS if not fault.startswith("http_") and fault not in ("redirect", "huge_header", "no_http")
)
# What a decode leg may do without prefill's ever noticing.
DECODE_ONLY = ("foreign_choice", "duplicate_end", "tokens_after_end", "lying_end", "drop_tokens", "no_end")
# A pod that does this is not believed: what the client has may be wrong.
PROTOCOL = ("garbage", "oversize", "foreign_choice", "duplicate_end", "tokens_after_end", "lying_end", "drop_tokens")
# The leg is over at the pod by its own word: no abort goes there.
OVER_AT_THE_POD = ("busy", "draining", "internal", "invalid", "http_429", "http_422")
CLIENT_FAULTS = ("invalid", "http_422")
STATUS = {
    "busy": 429,
    "http_429": 429,
    "internal": 500,
    "http_500_text": 500,
    "http_502_html": 500,
    "http_empty": 500,
    "redirect": 500,
    "invalid": 400,
    "http_422": 400,
    "foreign_choice": 502,
    "duplicate_end": 502,
    "tokens_after_end": 502,
    "lying_end": 502,
    "drop_tokens": 502,
    "garbage": 502,
    "oversize": 502,
    "huge_header": 502,
    "no_http": 502,
}
# The pod is back after each loss: the request is given up as one that takes engines down.
LOST_AGAIN_AND_AGAIN = dict.fromkeys(("cut", "cut_frame", "half_frame", "no_end", "stall"), 500)


def make_pods(*decode: str) -> tuple[ScriptedPod, ...]:
    return (ScriptedPod("p1", "prefill"), *(ScriptedPod(name, "decode") for name in decode))


async def assert_idle(router: Router, *pods: ScriptedPod) -> None:
    """Nothing is left: no leg at a pod, no gauge, no booking."""
    for pod in pods:
        await pod.wait_for(lambda pod=pod: pod.running == 0)
    assert await router.metric("router_requests_in_flight") == 0


def assert_error_only(body: bytes) -> None:
    """A stream that failed: whole events, one error, the last; never ``[DONE]``, never a finish reason."""
    found = events(body)
    assert "[DONE]" not in found
    assert [index for index, event in enumerate(found) if "error" in event] == [len(found) - 1]
    assert all(choice["finish_reason"] is None for event in found[:-1] for choice in event["choices"])
    assert "0x" not in body.decode()
    assert "/secret" not in body.decode()


async def read_all(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """The body as far as it came, and whether the connection broke off."""
    body = b""
    try:
        async for part in response.content.iter_any():
            body += part
    except aiohttp.ClientPayloadError:
        return body, True
    return body, False


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in (*DECODE_ONLY, *CLIENT_FAULTS)])
async def test_any_prefill_failure_is_answered_all_the_same(tmp_path: Path, fault: Fault) -> None:
    """One prefill pod that fails: decode computes the prompt, the answer is right and says ``recomputed``."""
    p, d = make_pods("d1")
    p.default["prefill"] = Script(fault=fault)
    async with running(tmp_path, p, d) as router:
        async with router.complete(PROMPT) as response:
            answer = await response.json()
            assert (response.status, response.headers["x-kvferry-path"]) == (200, "recomputed")
        assert answer["choices"][0]["text"] == PROMPT
        assert d.legs[0][1].recompute.startswith("prefill_")
        assert await router.metric("router_recomputes_total", reason=d.legs[0][1].recompute) == 1
        if fault in OVER_AT_THE_POD:
            await asyncio.sleep(0.05)
            assert p.aborts == []
        else:
            await p.wait_for(lambda: len(p.aborts) == 1)
        await assert_idle(router, p, d)


async def test_second_prefill_pod_takes_over(tmp_path: Path) -> None:
    """The failed pod is left out of the second choice, and the answer is disaggregated after all."""
    first, second, d = ScriptedPod("p1", "prefill"), ScriptedPod("p2", "prefill"), ScriptedPod("d1", "decode")
    first.default["prefill"] = second.default["prefill"] = Script()
    async with running(tmp_path, first, second, d) as router:
        first.scripts["prefill"] += [Script(fault="busy")] * 10
        second.scripts["prefill"] += []
        for _ in range(4):
            async with router.complete(PROMPT) as response:
                assert (await response.json())["choices"][0]["text"] == PROMPT
        assert len(second.legs) == 4
        retried = [decision for decision in await router.decisions() if decision["reason"] == "retry"]
        for decision in retried:
            assert decision["prefill"] == "p2"
            assert decision["filtered"]["prefill"]["p1"] == "it failed on this request"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in CLIENT_FAULTS])
async def test_decode_failure_before_the_first_byte_goes_to_another_pod(
    tmp_path: Path, fault: Fault, stream: bool
) -> None:
    """A decode leg that fails before the client has a byte: the other pod gives the whole right answer."""
    bad, good = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    after = 3 if not stream else 0
    async with running(tmp_path, bad, good) as router:
        tried = 0
        for _ in range(20):
            bad.scripts["decode"].clear()
            bad.scripts["decode"].append(Script(fault=fault, after=after))
            before = len(bad.legs)
            # What a stream sends before such a fault binds it: only an answer in one piece can begin anew.
            if stream and fault in ("duplicate_end", "tokens_after_end", "lying_end", "drop_tokens"):
                return
            async with router.complete(PROMPT, stream=stream) as response:
                body = await response.read()
            assert response.status == 200
            assert (text_of(body) if stream else json.loads(body)["choices"][0]["text"]) == PROMPT
            tried += len(bad.legs) - before
            if tried:
                break
            await router.wait_pods(2)
        assert tried
        if not stream and fault not in ("busy", "draining", "internal") and fault in STREAM_FAULTS:
            emitted = good.legs[-1][1].choices[0].emitted
            assert PROMPT.encode().startswith(bytes(emitted))
        await assert_idle(router, bad, good)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_only_decode_pod_failing_before_a_token_is_a_real_status(
    tmp_path: Path, fault: Fault, stream: bool
) -> None:
    """No other pod: an OpenAI-shaped error with its status; Retry-After where trying again makes sense."""
    if fault in ("duplicate_end", "tokens_after_end", "lying_end", "drop_tokens"):
        return
    p, d = make_pods("d1")
    d.default["decode"] = Script(fault=fault)
    async with running(tmp_path, p, d, flags=("--disaggregate", "never")) as router:
        async with router.complete(PROMPT, stream=stream) as response:
            error = (await response.json())["error"]
            assert response.status == (STATUS | LOST_AGAIN_AND_AGAIN).get(fault, 503)
            assert ("Retry-After" in response.headers) == (response.status in (429, 503))
        if fault in LOST_AGAIN_AND_AGAIN:
            assert error["code"] == "engine_lost_repeatedly"
        assert set(error) == {"message", "type", "param", "code"}
        assert "0x" not in error["message"]
        if fault in CLIENT_FAULTS:
            assert error["param"] == "messages"
            assert "scripted" in error["message"]
        await assert_idle(router, p, d)


@pytest.mark.parametrize("fault", STREAM_FAULTS)
async def test_stream_whose_last_decode_pod_is_lost_ends_in_an_error_event_and_a_cut_connection(
    tmp_path: Path, fault: Fault
) -> None:
    """What came is an exact prefix; then one error event; no [DONE], no clean end of the HTTP body."""
    p, d = make_pods("d1")
    d.gone_after_fault = True
    d.default["decode"] = Script(fault=fault)
    d.scripts["decode"].append(Script(fault=fault, after=5, pause_s=0.005))  # tokens come before the fault does
    async with running(tmp_path, p, d) as router:
        async with router.complete(PROMPT, stream=True) as response:
            body, broken = await read_all(response)
        assert response.status == 200
        assert_error_only(body)
        assert broken
        text = text_of(body)
        if fault != "drop_tokens":
            assert PROMPT.startswith(text)
        assert text
        await p.wait_for(lambda: len(p.aborts) == 1)  # the lease is withdrawn by the prefill leg's name
        assert p.aborts[0].attempt == 0
        if fault in OVER_AT_THE_POD:
            assert d.aborts == []
        else:
            await d.wait_for(lambda: len(d.aborts) >= 1)
            assert (d.aborts[0].internal_id, d.aborts[0].attempt) == (p.aborts[0].internal_id, 1)
        await assert_idle(router, p, d)


@pytest.mark.parametrize("fault", ["cut", "stall", "internal", "no_end"])
async def test_official_client_raises_on_a_stream_that_failed(tmp_path: Path, fault: Fault) -> None:
    """openai-python does not mistake the prefix for an answer."""
    p, d = make_pods("d1")
    d.gone_after_fault = True
    d.default["decode"] = Script(fault=fault)
    d.scripts["decode"].append(Script(fault=fault, after=5))
    async with running(tmp_path, p, d) as router:
        client = openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.completions.create(model="toy", prompt=PROMPT, max_tokens=20, stream=True)
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass


async def test_load_count_survives_probes_and_resets(tmp_path: Path) -> None:
    """Ten long streams over many probes and a failed one: the gauge stays ten and ends at zero."""
    p, d = make_pods("d1")
    d.default["decode"] = Script(pause_s=0.03)
    async with running(tmp_path, p, d) as router:

        async def one() -> bytes:
            async with router.complete(PROMPT, stream=True) as response:
                return (await read_all(response))[0]

        tasks = [asyncio.create_task(one()) for _ in range(10)]
        await d.wait_for(lambda: d.running == 10)
        assert await router.metric("router_requests_in_flight") == 10
        d.ready = False
        await router.wait_ready(False)
        d.ready = True
        await router.wait_ready()
        assert await router.metric("router_requests_in_flight") == 10
        for body in await asyncio.gather(*tasks):
            assert text_of(body) == PROMPT
        await assert_idle(router, p, d)


async def test_frozen_pod_is_out_within_two_probes(tmp_path: Path) -> None:
    """A pod that accepts and says nothing is dropped; the other one serves, nobody waits for it."""
    frozen, good = ScriptedPod("d1", "decode"), ScriptedPod("d2", "decode")
    async with running(tmp_path, frozen, good) as router:
        frozen.reply_delay_s = 30.0
        await router.wait_pods(1, timeout_s=2 * LIMITS.pod_reply_s + 0.5)
        for _ in range(6):
            async with router.complete(PROMPT) as response:
                assert response.status == 200
        assert frozen.legs == []


async def test_overload_is_429_and_the_probe_still_answers(tmp_path: Path) -> None:
    """Beyond in-flight and queue caps: 429 with Retry-After at once; health is not in the queue."""
    import msgspec

    p, d = make_pods("d1")
    d.default["decode"] = Script(pause_s=0.02)
    limits = msgspec.structs.replace(LIMITS, inflight=4, queue=4, queue_wait_s=5.0)
    async with running(tmp_path, p, d, limits=limits) as router:

        async def one() -> int:
            async with router.complete(PROMPT) as response:
                body = await response.json()
                if response.status == 429:
                    assert response.headers["Retry-After"] == "1"
                    assert body["error"]["type"] == "rate_limit_error"
                return response.status

        tasks = [asyncio.create_task(one()) for _ in range(30)]
        await asyncio.sleep(0.05)
        async with router.session.get(router.url + "/healthz") as response:
            assert response.status == 200
        statuses = await asyncio.gather(*tasks)
        assert sorted(set(statuses)) == [200, 429]
        assert statuses.count(200) == 8
        assert await router.metric("router_requests_total", outcome="busy") == 22


async def test_queued_request_is_refused_after_its_time(tmp_path: Path) -> None:
    """A place that does not come free in time is a 429, not a hang."""
    import msgspec

    d = ScriptedPod("d1", "decode")
    d.default["decode"] = Script(pause_s=0.05)
    limits = msgspec.structs.replace(LIMITS, inflight=1, queue=4, queue_wait_s=0.1)
    async with running(tmp_path, d, limits=limits) as router:
        first = asyncio.create_task(router.complete(PROMPT).__aenter__())
        await d.wait_for(lambda: d.running == 1)
        async with router.complete(PROMPT) as response:
            assert response.status == 429
        (await first).close()


async def test_request_deadline_ends_what_every_pod_keeps_alive(tmp_path: Path) -> None:
    """Pods that are alive and slow for ever: 504 at the deadline, both aborted."""
    p, d = make_pods("d1")
    d.default["decode"] = Script(pause_s=0.2)
    async with running(tmp_path, p, d, flags=("--request-deadline", "0.7")) as router:
        async with router.complete(PROMPT) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "deadline_exceeded"
        await d.wait_for(lambda: len(d.aborts) == 1)
        await p.wait_for(lambda: len(p.aborts) == 1)
        await assert_idle(router, p, d)


async def test_prefill_streams_that_never_close_are_closed_by_the_router(tmp_path: Path) -> None:
    """A pod that keeps its streams open after `Prefilled` holds no connection of the router beyond the drain."""
    p, d = ScriptedPod("p1", "prefill"), ScriptedPod("d1", "decode")
    p.default["prefill"] = Script(open_s=60)
    async with running(tmp_path, p, d) as router:

        async def ask() -> None:
            async with router.complete() as response:
                assert (await response.json())["choices"][0]["text"] == "hello"

        await asyncio.gather(*(ask() for _ in range(8)))
        assert len(p.legs) == 8
        await p.wait_for(lambda: p.running == 0, timeout_s=2.5)
        assert p.broken == ["prefill"] * 8
        assert p.aborts == []
