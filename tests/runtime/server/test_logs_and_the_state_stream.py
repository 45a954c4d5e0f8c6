"""What a pod tells the outside besides answers: log lines without prompts, and a state stream for key holders only."""

import asyncio
import json

import pytest
import zmq
import zmq.asyncio

from kvferry_service.curve import secure_client
from kvferry_service.key_files import load_keys, secret_strings
from kvferry_wire import state
from kvferry_wire.frames import End
from kvferry_wire.state import BlocksStored, Load, StateMessage
from tests.runtime.server.harness import PodProcess, frames, make_leg

pytestmark = pytest.mark.processes


async def test_lines_have_ids_and_hold_no_prompt_and_no_key(pod: PodProcess) -> None:
    """Every line is JSON; a request's lines carry both ids; neither its text nor a key is in any."""
    secret = "xyzzy plugh secret prompt"
    async with pod.client() as client:
        body = {"model": "toy", "prompt": secret, "max_tokens": 2}
        async with client.post("/v1/completions", json=body, headers={"x-request-id": "log-me"}) as response:
            assert response.status == 200
        body["temperature"] = secret
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 400
    text = pod.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    mine = [line for line in lines if line.get("request_id") == "log-me"]
    assert mine
    assert all(line["internal_id"].startswith("int-") for line in mine)
    assert mine[-1]["tokens"] == 2
    assert secret not in text
    assert pod.keys is not None
    assert not [key for key in secret_strings(load_keys(pod.keys, need_kv=True)) if key in text]
    start = next(line["message"] for line in lines if line["message"].startswith("ready: "))
    for part in ("toy", "role both", "dtype int64", "1 threads (--threads)", "255 KV blocks", "--kv-blocks", "a step"):
        assert part in start


async def test_the_state_stream_joins_with_the_snapshot(pod: PodProcess) -> None:
    """Subscribe, fetch the snapshot, apply what is later: the blocks of a new prompt appear, numbers have no gap."""
    assert pod.keys is not None
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        secure_client(socket, load_keys(pod.keys, need_kv=True).state)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"tcp://127.0.0.1:{pod.ready()['state']}")
        async with asyncio.timeout(5):
            first = state.decode_message(await socket.recv())
        async with pod.client() as client:
            async with client.get("/internal/v1/state") as response:
                snapshot = state.decode_snapshot(await response.read())
            assert snapshot.incarnation == first.incarnation == bytes.fromhex(pod.ready()["incarnation"])
            got = await frames(client, "generate", make_leg("streamed", prompt="state stream " * 5))
            assert isinstance(got[-1], End)
        messages: list[StateMessage] = [first]
        stored: list[bytes] = []
        async with asyncio.timeout(5):
            while len(stored) < 4:
                messages.append(state.decode_message(await socket.recv()))
                if messages[-1].sequence > snapshot.sequence and isinstance(messages[-1].event, BlocksStored):
                    stored += messages[-1].event.hashes
        assert not set(stored) & set(snapshot.hashes)
        numbers = [message.sequence for message in messages]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert any(isinstance(message.event, Load) for message in messages)
    finally:
        socket.close(0)
        context.term()


async def test_the_state_stream_says_nothing_without_the_key(pod: PodProcess) -> None:
    """A plain subscriber hears nothing for longer than the load interval."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"tcp://127.0.0.1:{pod.ready()['state']}")
        assert not await socket.poll(1500)
    finally:
        socket.close(0)
        context.term()
