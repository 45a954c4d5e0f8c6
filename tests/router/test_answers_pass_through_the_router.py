"""The router between a client and scripted pods: answers, paths, headers, models, and refusals."""

import asyncio
import json
from hashlib import sha256
from pathlib import Path

import pytest

from kvferry_router.config import ConfigError

from .harness import events, make_config, running, text_of
from .scripted_pod import KEYS, Script, ScriptedPod


def make_pods() -> tuple[ScriptedPod, ScriptedPod]:
    return ScriptedPod("p1", "prefill"), ScriptedPod("d1", "decode")


async def test_disaggregated_stream_is_whole(tmp_path: Path) -> None:
    """First token from prefill, the rest from decode; one [DONE], right headers, headers with the first chunk."""
    p, d = make_pods()
    async with running(tmp_path, p, d) as router:
        async with router.complete("the marker", stream=True) as response:
            body = await response.read()
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-kvferry-path"] == "disaggregated"
        assert response.headers["x-request-id"]
        assert text_of(body) == "the marker"
        assert events(body)[-1] == "[DONE]"
        assert body.count(b"[DONE]") == 1
        (kind, prefill), (other, decode) = p.legs[0], d.legs[0]
        assert (kind, other) == ("prefill", "decode")
        assert decode.choices[0].emitted == (ord("t"),)
        assert decode.handle is not None
        assert decode.prompt_ids == prefill.prompt_ids
        assert decode.extras.tenant_salt
        assert decode.deadline_ms <= 600_000


async def test_whole_answer_is_one_body(tmp_path: Path) -> None:
    """Not streamed: a JSON object with the final path."""
    p, d = make_pods()
    async with running(tmp_path, p, d) as router:
        async with router.complete("the marker") as response:
            answer = await response.json()
        assert answer["choices"][0]["text"] == "the marker"
        assert answer["usage"]["completion_tokens"] == 10
        assert response.headers["x-kvferry-path"] == "disaggregated"
        async with router.chat("hi", max_tokens=4) as response:
            answer = await response.json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"]["content"] == "user"


async def test_short_prompt_takes_the_aggregated_path(tmp_path: Path) -> None:
    """Below the threshold prefill is not asked; the explain API says why, with each pod's formula."""
    p, d = make_pods()
    async with running(tmp_path, p, d, flags=()) as router:
        async with router.complete("abc") as response:
            assert (await response.json())["choices"][0]["text"] == "abc"
        assert response.headers["x-kvferry-path"] == "aggregated"
        assert p.legs == []
        decision = (await router.decisions())[0]
        assert (decision["reason"], decision["decode"]) == ("short", "d1")
        assert "queue 0.0000 + prefill" in decision["scores"]["alone"][0]["formula"]


@pytest.mark.parametrize(("mode", "path"), [("never", "aggregated"), ("always", "disaggregated")])
async def test_mode_overrides_the_thresholds(tmp_path: Path, mode: str, path: str) -> None:
    """``never`` splits nothing; ``always`` splits the shortest prompt too."""
    prompt = "abc" if mode == "always" else "a long enough prompt"
    async with (
        running(tmp_path, *make_pods(), flags=("--disaggregate", mode)) as router,
        router.complete(prompt) as response,
    ):
        assert response.headers["x-kvferry-path"] == path


async def test_request_id_is_echoed_and_a_bad_one_replaced(tmp_path: Path) -> None:
    """The client's id comes back and reaches the pods; it never names a leg."""
    p, d = make_pods()
    async with running(tmp_path, p, d) as router:
        for given in ("my-id", "my-id"):  # the same twice is no conflict
            async with router.session.post(
                router.url + "/v1/completions",
                json={"model": "toy", "prompt": "abcdefgh"},
                headers={"x-request-id": given},
            ) as response:
                assert response.headers["x-request-id"] == "my-id"
        assert {leg.request_id for _, leg in d.legs} == {"my-id"}
        assert len({leg.internal_id for _, leg in d.legs}) == 2
        async with router.session.get(router.url + "/v1/models", headers={"x-request-id": "ä" * 4}) as response:
            assert response.headers["x-request-id"].startswith("req-")


async def test_models_names_the_one_model(tmp_path: Path) -> None:
    """The list, the card, and 404 for another name, on each route that takes one."""
    async with running(tmp_path, *make_pods()) as router:
        async with router.session.get(router.url + "/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["toy"]
        async with router.session.get(router.url + "/v1/models/toy") as response:
            assert (await response.json())["object"] == "model"
        async with router.session.get(router.url + "/v1/models/org/other") as response:
            assert response.status == 404
        async with router.complete(model="other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


async def test_no_capacity_is_503_with_retry_after_within_a_second(tmp_path: Path) -> None:
    """Zero pods, zero decode: 503. Zero prefill: decode does the whole job."""
    p, d = make_pods()
    loop = asyncio.get_running_loop()
    async with running(tmp_path, p, d) as router:
        router.write_pods(p)
        await router.wait_ready(False)
        begun = loop.time()
        async with router.complete("the marker") as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "unavailable"
        assert loop.time() - begun < 1.0
        async with router.session.get(router.url + "/v1/models") as response:
            assert response.status == 503
        async with router.session.get(router.url + "/readyz") as response:
            assert "no decode pod" in (await response.json())["reason"]
        router.write_pods(d)
        await router.wait_ready()
        async with router.complete("the marker") as response:
            assert (await response.json())["choices"][0]["text"] == "the marker"
            assert response.headers["x-kvferry-path"] == "aggregated"


async def test_forged_internals_reach_no_pod(tmp_path: Path) -> None:
    """Transfer parameters in the body are refused by name; headers of other routers go nowhere."""
    p, d = make_pods()
    forged = {
        "x-prefiller-host-port": "10.0.0.1:80",
        "x-data-parallel-host-port": "10.0.0.1:80",
        "x-kvferry-path": "forged",
        "Authorization": "Bearer client",
        "Accept-Encoding": "gzip",
        "X-Foo": "bar",
        "Connection": "keep-alive, X-Foo",
    }
    async with running(tmp_path, p, d) as router:
        for field in ("kv_transfer_params", "cache_salt", "request_id"):
            async with router.complete(**{field: {"remote_host": "10.0.0.1"}}) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == field
        assert d.legs == []
        body = {"model": "toy", "prompt": "abcdefgh"}
        async with router.session.post(router.url + "/v1/completions", json=body, headers=forged) as response:
            assert response.status == 200
            assert response.headers["x-kvferry-path"] == "disaggregated"
        for seen in (*p.headers, *d.headers):
            assert set(map(str.lower, seen)) == {
                "host",
                "authorization",
                "content-type",
                "content-length",
                "x-request-id",
            }
            assert seen["Authorization"] == f"Bearer {KEYS.bearer()}"


async def test_chunked_body_and_odd_headers_are_served(tmp_path: Path) -> None:
    """Transfer-Encoding, Expect and an odd Host are the hop's own matter."""
    async with running(tmp_path, *make_pods()) as router:
        host, port = "127.0.0.1", int(router.url.rpartition(":")[2])
        body = json.dumps({"model": "toy", "prompt": "abcdefgh", "max_tokens": 8}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: odd.example:1\r\nTransfer-Encoding: chunked\r\n"
            "Expect: 100-continue\r\nConnection: close, X-Foo\r\nContent-Type: application/json\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert b"100 Continue" in answer
        assert b"200 OK" in answer
        assert b'"abcdefgh"' in answer


async def test_api_keys_are_asked_for_and_make_the_tenant(tmp_path: Path) -> None:
    """Without a key 401; two tenants' legs carry two salts; the explain API wants the service's own key."""
    p, d = make_pods()
    keys = tmp_path / "api"
    keys.write_text(
        "".join(f"{t}:{sha256(k.encode()).hexdigest()}\n" for t, k in (("a", "ka"), ("a", "kb"), ("b", "kc")))
    )
    flags = ("--auth", "api-keys", "--api-keys-file", str(keys))
    async with running(tmp_path, p, d, flags=flags) as router:
        async with router.complete() as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/nothing", "/internal/v1/decisions"):
            async with router.session.get(router.url + path) as response:
                assert response.status == 401
        salts = {}
        for key in ("ka", "kb", "kc"):
            async with router.session.post(
                router.url + "/v1/completions",
                json={"model": "toy", "prompt": "abcdefgh"},
                headers={"Authorization": f"Bearer {key}"},
            ) as response:
                assert response.status == 200
            salts[key] = d.legs[-1][1].extras.tenant_salt
        assert salts["ka"] == salts["kb"] != salts["kc"]
        async with router.session.get(
            router.url + "/internal/v1/decisions", headers={"Authorization": "Bearer ka"}
        ) as response:
            assert response.status == 401
        assert await router.decisions()


async def test_fifty_requests_on_one_connection_get_their_own_answers(tmp_path: Path) -> None:
    """Keep-alive, four at a time, some aborted: each answer carries its own marker."""
    p, d = make_pods()
    async with running(tmp_path, p, d) as router:
        gate = asyncio.Semaphore(4)

        async def one(number: int) -> None:
            marker = f"marker-{number:04d}-" + "x" * (number % 7)
            async with gate:
                if number % 9 == 4:
                    async with router.complete(marker, stream=True) as response:
                        await response.content.readany()
                    return  # left in the middle
                async with router.complete(marker, stream=number % 2 == 0) as response:
                    body = await response.read()
                assert response.status == 200
                text = text_of(body) if number % 2 == 0 else json.loads(body)["choices"][0]["text"]
                assert text == marker

        await asyncio.gather(*(one(number) for number in range(50)))
        await p.wait_for(lambda: p.running == 0)
        await d.wait_for(lambda: d.running == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_one_byte_segments_make_the_same_answer(tmp_path: Path, stream: bool) -> None:
    """Frames cut at every byte: each event of the client is one whole document in valid UTF-8."""
    p, d = make_pods()
    p.default["prefill"] = d.default["decode"] = Script(one_byte=True)
    prompt = "naïve 🎉🚀 café 你好"
    async with running(tmp_path, p, d) as router:
        async with router.complete(prompt, stream=stream, max_tokens=len(prompt.encode())) as response:
            body = await response.read()
        assert (text_of(body) if stream else json.loads(body)["choices"][0]["text"]) == prompt


async def test_choices_are_kept_apart(tmp_path: Path) -> None:
    """Three choices over one prefill: each index whole, usage summed."""
    async with running(tmp_path, *make_pods()) as router:
        async with router.complete("abcdefgh", n=3) as response:
            answer = await response.json()
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
            (index, "abcdefgh") for index in range(3)
        ]
        assert answer["usage"]["completion_tokens"] == 24


async def test_gauges_return_to_zero_and_labels_stay_few(tmp_path: Path) -> None:
    """After good, bad and abandoned requests nothing counts as under way, and no pod or tenant name is a label."""
    p, d = make_pods()
    async with running(tmp_path, p, d) as router:
        for prompt in ("abcdefgh", "ab"):
            async with router.complete(prompt) as response:
                assert response.status == 200
        async with router.complete(temperature=99) as response:
            assert response.status == 400
        async with router.complete("abcdefgh", stream=True) as response:
            await response.content.readany()
        await d.wait_for(lambda: d.running == 0)
        assert await router.metric("router_requests_in_flight") == 0
        assert await router.metric("router_requests_queued") == 0
        assert await router.metric("router_requests_total", outcome="ok", path="disaggregated") >= 1
        assert await router.metric("router_requests_total", outcome="invalid", path="none") == 1
        assert await router.metric("router_decisions_total", reason="short") == 1
        async with router.session.get(router.url + "/metrics") as response:
            text = await response.text()
        assert "d1" not in text
        assert "default" not in text


def test_flags_are_checked_together(tmp_path: Path) -> None:
    """Every bad value is named at once, with what is accepted."""
    with pytest.raises(ConfigError) as caught:
        make_config(tmp_path, "--auth", "api-keys", "--port", "70000", "--disaggregate-max-cached-share", "2")
    message = str(caught.value)
    assert all(flag in message for flag in ("--port", "--disaggregate-max-cached-share", "--api-keys-file"))
