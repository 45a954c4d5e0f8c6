"""An engine that stands still for a while gets all that was sent to it meanwhile, up to what may wait."""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import pytest
import uvloop

from kvferry_runtime.core.messages import FailOut, LegKey, Submit, TokensOut
from kvferry_runtime.engine.child import EngineGoneError
from kvferry_runtime.engine.client import EngineClient
from kvferry_runtime.engine.messages import EngineConfig
from kvferry_runtime.engine.streams import LegStream
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.leg import Sampling
from kvferry_wire.limits import DEFAULT_LIMITS, Limits

pytestmark = pytest.mark.processes

PROMPT = 4000  # tokens: sixty such messages are more than the kernel keeps
LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]
MakeLoop = Callable[[], asyncio.AbstractEventLoop]


def run(make_loop: MakeLoop, main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await main()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(bounded())


@asynccontextmanager
async def running(limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[EngineClient]:
    config = EngineConfig(model="toy:ctx=8192", model_digest="", threads=1, log_level="WARNING", limits=limits)
    client = EngineClient(config)
    client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


@contextmanager
def stopped(client: EngineClient) -> Iterator[None]:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(client.pid, signal.SIGCONT)


def submit(client: EngineClient, number: int) -> LegStream:
    return client.submit(
        Submit(
            key=LegKey(f"leg-{number}", 0),
            kind="generate",
            prompt_ids=(number, *(300 + place % 200 for place in range(PROMPT))),
            emitted=((),),
            sampling=Sampling(seed=0, max_tokens=3, ignore_eos=True),
            extras=KeyExtras(),
            deadline_s=60.0,
            eos_token_ids=(),
        )
    )


async def tokens(client: EngineClient, stream: LegStream) -> int:
    count, finish = 0, None
    while finish is None:
        output = await stream.next(60.0)
        assert isinstance(output, TokensOut), output
        count, finish = count + len(output.ids), output.finish
    client.finish(stream.key, abort=False)
    return count


@pytest.mark.parametrize("make_loop", LOOPS)
def test_what_the_kernel_does_not_keep_arrives_too(make_loop: MakeLoop) -> None:
    """Every leg that was taken runs to its end."""

    async def main() -> None:
        async with running() as client:
            with stopped(client):
                streams = [submit(client, number) for number in range(60)]
                assert client._child is not None
                assert client._child._socket.waiting > 1
                await asyncio.sleep(0.1)
            assert await asyncio.gather(*(tokens(client, stream) for stream in streams)) == [3] * 60
            assert client._child._socket.waiting == 0
            assert client.starts == 1

    run(make_loop, main)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_what_may_not_wait_any_more_is_refused(make_loop: MakeLoop) -> None:
    """At once and by an error, and what was taken before is not lost by it."""

    async def main() -> None:
        async with running(msgspec.structs.replace(DEFAULT_LIMITS, engine_messages=5)) as client:
            streams = []
            with stopped(client):
                with pytest.raises(EngineGoneError, match="takes no message: 5 wait"):
                    while len(streams) < 200:
                        streams.append(submit(client, len(streams)))
                assert client.running() == len(streams)
            assert await asyncio.gather(*(tokens(client, stream) for stream in streams)) == [3] * len(streams)
            assert await tokens(client, submit(client, 500)) == 3
            assert client.running() == 0

    run(make_loop, main)


@pytest.mark.parametrize("make_loop", LOOPS)
@pytest.mark.usefixtures("open_files")
def test_one_that_is_killed_with_messages_on_their_way_is_replaced(make_loop: MakeLoop) -> None:
    """Its legs fail, nothing of its socket stays in the loop, and the next engine gets only its own messages."""

    async def main() -> None:
        async with running() as client:
            former = client.pid
            assert former is not None
            os.kill(former, signal.SIGSTOP)
            streams = [submit(client, number) for number in range(60)]
            os.kill(former, signal.SIGKILL)
            for stream in streams:
                output = await stream.next(20.0)
                assert isinstance(output, FailOut)
                assert output.kind == "internal"
                client.finish(stream.key, abort=True)
            await client.wait_ready()
            assert await tokens(client, submit(client, 7)) == 3
            assert client.starts == 2

    run(make_loop, main)


@pytest.mark.parametrize("make_loop", LOOPS)
def test_an_engine_that_cannot_be_told_anything_is_replaced(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats would go on for ever, and every leg be refused."""

    async def main() -> None:
        async with running() as client:
            assert client._child is not None
            monkeypatch.setattr(client._child._socket, "_socket", Exhausted(client._child._socket._socket))
            with pytest.raises(EngineGoneError, match="No buffer space"):
                submit(client, 1)
            async with asyncio.timeout(60):
                while client.starts == 1 or client.not_ready():  # noqa: ASYNC110 - another process's doing
                    await asyncio.sleep(0.05)
            assert await tokens(client, submit(client, 2)) == 3

    run(make_loop, main)


class Exhausted:
    """A socket for whose next message the system has no memory."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real

    def send(self, data: bytes) -> int:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
