"""Router, prefill and decode as real processes over the toy model: every answer is what the oracle says, exactly."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from kvferry_runtime.model.toy_oracle import ToyOracle
from kvferry_runtime.model.toy_spec import parse_toy_name
from kvferry_service.key_files import copy_keys, create_keys, load_keys
from kvferry_service.parent import Child, spawn
from kvferry_wire.state import decode_snapshot

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

MODEL = "toy:step_ms=20"  # slow enough to be caught in the middle
NAME = "toy"
START_S = 90.0  # on a machine that is busy with other things
PROMPT = "A prompt that is long enough to be worth the way from one pod to the other. " * 3


def expected(prompt: str, tokens: int) -> str:
    """What the toy model says greedily."""
    oracle = ToyOracle(parse_toy_name(MODEL))
    for byte in prompt.encode():
        oracle.feed(byte)
    answer = []
    for _ in range(tokens):
        answer.append(oracle.candidates()[0])
        oracle.feed(answer[-1])
    return bytes(answer).decode()


class Service:
    """The three processes, on ports that stay over restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: dict[str, Child] = {}
        create_keys(folder / "keys")
        copy_keys(folder / "keys", folder / "router-keys", ("http", "state", "hash"))
        names = [*(f"{pod}.{plane}" for pod in ("p", "d") for plane in ("http", "control", "data", "state")), "r.http"]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        pods = [
            {"name": pod, "role": role, "host": "127.0.0.1"}
            | {"http": self.ports[f"{pod}.http"], "state": self.ports[f"{pod}.state"]}
            for pod, role in (("p", "prefill"), ("d", "decode"))
        ]
        (folder / "pods.json").write_text(json.dumps({"pods": pods}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['r.http']}"

    def start(self, name: str) -> None:
        argv = [sys.executable, "-m"]
        if name == "r":
            argv += ["kvferry_router", "--service-name", "svc", "--model-name", NAME, "--auth", "none"]
            argv += ["--pods-file", str(self.folder / "pods.json"), "--keys-dir", str(self.folder / "router-keys")]
            argv += ["--port", str(self.ports["r.http"]), "--disaggregate-min-tokens", "32"]
        else:
            argv += ["kvferry_runtime.server", "--model", MODEL, "--served-name", NAME, "--kv-blocks", "2000"]
            argv += ["--role", "prefill" if name == "p" else "decode", "--keys-dir", str(self.folder / "keys")]
            argv += ["--port", str(self.ports[f"{name}.http"])]
            for plane in ("control", "data", "state"):
                argv += [f"--{plane}-port", str(self.ports[f"{name}.{plane}"])]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = spawn(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """Kill the pod's API server and, by its death, its engine."""
        child = self.children.pop(name)
        child.process.kill()
        child.process.wait()
        child.let_go()

    def stop(self) -> dict[str, int]:
        """Stop all in order; the exit statuses."""
        for child in self.children.values():
            child.process.terminate()
        statuses = {name: child.process.wait(20.0) for name, child in self.children.items()}
        for child in self.children.values():
            child.let_go()
        return statuses

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")

    async def pods_ready(self, session: aiohttp.ClientSession, count: int) -> None:
        """Until the router uses this many pods."""
        async with asyncio.timeout(START_S):
            while True:
                try:
                    if await self.metric(session, self.url, "router_pods", 'state="ready"') == count:
                        return
                except aiohttp.ClientError:
                    pass  # the router is starting
                for name, child in self.children.items():
                    assert child.process.poll() is None, f"{name} ended: {self.log(name)[-2000:]}"
                await asyncio.sleep(0.1)

    async def metric(self, session: aiohttp.ClientSession, url: str, name: str, label: str = "") -> float:
        async with session.get(url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line for line in lines if line.startswith(f"kvferry:{name}") and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    async def load(self, session: aiohttp.ClientSession, pod: str) -> dict[str, Any]:
        """The pod's own account: running, waiting, free and total blocks, leases."""
        keys = load_keys(self.folder / "keys", need_kv=True)
        headers = {"Authorization": f"Bearer {keys.bearer()}"}
        async with session.get(
            f"http://127.0.0.1:{self.ports[f'{pod}.http']}/internal/v1/state", headers=headers
        ) as response:
            return msgspec.structs.asdict(decode_snapshot(await response.read()).load)

    async def wait_idle(self, session: aiohttp.ClientSession, within_s: float) -> None:
        """Until both pods have nothing running, no lease and every block free."""
        async with asyncio.timeout(within_s):
            while True:
                loads = [await self.load(session, pod) for pod in ("p", "d")]
                if all(
                    load["running"] == load["waiting"] == load["leases"] == 0
                    and load["free_blocks"] == load["total_blocks"]
                    for load in loads
                ):
                    return
                await asyncio.sleep(0.02)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    for name in ("p", "d", "r"):
        service.start(name)
    try:
        yield service
    finally:
        statuses = service.stop()
        assert set(statuses.values()) == {0}, f"{statuses}: {service.log('r')[-3000:]}"


@pytest.fixture
async def service(processes: Service) -> Service:
    """All three processes up, whatever the test before did to them."""
    for name in ("p", "d"):
        if name not in processes.children:
            processes.start(name)
    async with make_session() as session:
        await processes.pods_ready(session, 2)
    return processes


def make_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))


def make_body(prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0} | fields


async def complete(session: aiohttp.ClientSession, url: str, **fields: Any) -> tuple[int, dict[str, str], Any]:
    async with session.post(url + "/v1/completions", json=make_body(**fields)) as response:
        return response.status, dict(response.headers), await response.json()


def texts_and_error(body: bytes) -> tuple[str, bool, bool]:
    """Of a completion's stream: the text, whether an error event came, whether it said [DONE]."""
    text, failed, done = "", False, False
    for block in body.decode().split("\n\n"):
        if block == "data: [DONE]":
            done = True
        elif block.startswith("data: "):
            document = json.loads(block.removeprefix("data: "))
            failed |= "error" in document
            text += "".join(choice["text"] for choice in document.get("choices", ()))
    return text, failed, done


async def read_all(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    try:
        async for part in response.content.iter_any():
            body += part
    except aiohttp.ClientPayloadError:
        pass  # cut, as it must be after an error event
    return body


async def test_ferried_answers_equal_the_oracle(service: Service) -> None:
    """Prompts around block borders, streamed and whole, at once: exact text, prefill at P, KV pulled by D."""
    async with make_session() as session:
        prompts = [f"ferried {extra}: {PROMPT}"[: 33 + 7 * extra] for extra in range(8)]

        async def one(prompt: str, stream: bool) -> None:
            if not stream:
                status, headers, answer = await complete(session, service.url, prompt=prompt)
                assert status == 200
                assert answer["choices"][0]["text"] == expected(prompt, 24)
                assert headers["x-kvferry-path"] == "disaggregated"
                return
            async with session.post(service.url + "/v1/completions", json=make_body(prompt, stream=True)) as response:
                body = await response.read()
            assert texts_and_error(body) == (expected(prompt, 24), False, True)

        await asyncio.gather(*(one(prompt, stream) for prompt in prompts for stream in (True, False)))
        await service.wait_idle(session, 5.0)


async def test_official_client_reads_chat_through_the_router(service: Service) -> None:
    """openai-python, streamed with usage and whole, two choices."""
    client = openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0)
    async with client:
        messages: Any = [{"role": "user", "content": PROMPT}]
        rendered = f"user: {PROMPT}\nassistant: "
        whole = await client.chat.completions.create(model=NAME, messages=messages, max_tokens=16, temperature=0, n=2)
        assert [choice.message.content for choice in whole.choices] == [expected(rendered, 16)] * 2
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 32
        text, usage = "", None
        stream = await client.chat.completions.create(
            model=NAME,
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == expected(rendered, 16)
        assert usage is not None
        assert usage.completion_tokens == 16
        assert [model.id async for model in client.models.list()] == [NAME]


async def test_index_learns_what_decode_has(service: Service) -> None:
    """A prompt that decode pulled and decoded is in its cache, as the state stream says: the next time it is alone."""
    prompt = "Something that no other test asks: " + PROMPT
    async with make_session() as session:
        _, headers, _ = await complete(session, service.url, prompt=prompt)
        assert headers["x-kvferry-path"] == "disaggregated"
        async with asyncio.timeout(5):
            while True:
                _, headers, answer = await complete(session, service.url, prompt=prompt)
                assert answer["choices"][0]["text"] == expected(prompt, 24)
                if headers["x-kvferry-path"] == "aggregated":
                    break
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_killed_decode_ends_streams_in_an_error_and_serves_again(service: Service) -> None:
    """kill -9 in mid-stream: an exact prefix and an error event, no [DONE]; right answers once it is back."""
    async with make_session() as session:

        async def one(number: int) -> None:
            prompt = f"{number}: {PROMPT}"
            body = make_body(prompt, stream=True, max_tokens=400)
            async with session.post(service.url + "/v1/completions", json=body) as response:
                assert response.status == 200
                text, failed, done = texts_and_error(await read_all(response))
            assert (failed, done) == (True, False)
            assert text
            assert expected(prompt, 400).startswith(text)

        streams = [asyncio.create_task(one(number)) for number in range(6)]
        await asyncio.sleep(1.0)
        service.kill("d")
        await asyncio.gather(*streams)
        status, headers, answer = await complete(session, service.url)
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert headers["Retry-After"] == "1"
        service.start("d")
        await service.pods_ready(session, 2)
        status, _, answer = await complete(session, service.url)
        assert (status, answer["choices"][0]["text"]) == (200, expected(PROMPT, 24))
        # Leases whose reader died end with their time at the latest.
        await service.wait_idle(session, 20.0)


async def test_killed_prefill_costs_no_answer(service: Service) -> None:
    """kill -9 of the only prefill pod under load: every answer is right, decode computed what it had to."""
    async with make_session() as session:

        async def one(number: int) -> None:
            prompt = f"{number}! {PROMPT}"
            status, headers, answer = await complete(session, service.url, prompt=prompt)
            assert (status, answer.get("error")) == (200, None)
            assert answer["choices"][0]["text"] == expected(prompt, 24)
            assert headers["x-kvferry-path"] in ("disaggregated", "aggregated", "recomputed")

        async def some() -> None:
            for number in range(24):
                await asyncio.sleep(0.05)
                asked.append(asyncio.create_task(one(number)))

        asked: list[asyncio.Task[None]] = []
        asking = asyncio.create_task(some())
        await asyncio.sleep(0.5)
        service.kill("p")
        await asking
        await asyncio.gather(*asked)
        status, headers, answer = await complete(session, service.url, prompt="after: " + PROMPT)
        assert (status, headers["x-kvferry-path"]) == (200, "aggregated")
        service.start("p")
        await service.pods_ready(session, 2)
        status, headers, answer = await complete(session, service.url, prompt="back: " + PROMPT)
        assert answer["choices"][0]["text"] == expected("back: " + PROMPT, 24)
        assert headers["x-kvferry-path"] == "disaggregated"


async def test_leaving_client_frees_both_pods_within_a_second(service: Service) -> None:
    """Streamed and whole, at several moments: nothing runs, no lease is held and every block is free."""
    async with make_session() as session:
        await service.wait_idle(session, 20.0)
        for number, (stream, stay_s) in enumerate(
            [(True, 0.02), (False, 0.02), (True, 0.3), (False, 0.3), (True, 0.8)]
        ):
            body = make_body(f"{number}. {PROMPT}", stream=stream, max_tokens=2000)
            task = asyncio.create_task(_ask_for(session, service.url, body))
            await asyncio.sleep(stay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await service.wait_idle(session, 1.5)


async def _ask_for(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url + "/v1/completions", json=body) as response:
        await response.read()


async def test_bad_input_is_the_clients_and_the_engines_go_on(service: Service) -> None:
    """4xx that names the field; both pods keep their incarnation."""
    async with make_session() as session:
        cases: list[tuple[Any, int, str | None]] = [
            ({"prompt": "x" * 5000}, 400, "prompt"),
            ({"model": "gpt-4"}, 404, "model"),
            ({"temperature": 1e308}, 400, "temperature"),
            ({"n": 10**9}, 400, "n"),
            ({"max_tokens": "7"}, 400, "max_tokens"),
            ({"prompt": []}, 400, "prompt"),
            ({"prompt": [-1]}, 400, "prompt"),
            ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, 400, "kv_transfer_params"),
        ]
        for fields, expected_status, param in cases:
            status, _, answer = await complete(session, service.url, **fields)
            assert (status, answer["error"]["param"]) == (expected_status, param), fields
        for raw in (b"{", b"\xff\xfe", b'{"model": "toy", "prompt": "\xc3"}', b"[]", b""):
            async with session.post(service.url + "/v1/completions", data=raw) as response:
                assert 400 <= response.status < 500, raw
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        status, _, answer = await complete(session, service.url)
        assert answer["choices"][0]["text"] == expected(PROMPT, 24)


async def test_router_ends_on_sigterm_with_status_zero(service: Service) -> None:
    """An ordered end, with no prompt text and no traceback in its log; the next router serves."""
    async with make_session() as session:
        router = service.children["r"]
        router.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(router.process.wait, 20) == 0
        router.let_go()
        log = service.log("r")
        assert "long enough to be worth" not in log
        assert "Traceback" not in log
        service.start("r")
        await service.pods_ready(session, 2)
        status, _, _ = await complete(session, service.url)
        assert status == 200
