"""The API server's end of the engine: closing it at any time leaves no process, no socket and no file."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kvferry_runtime.core.messages import LegKey, Submit
from kvferry_runtime.engine.child import EngineGoneError
from kvferry_runtime.engine.client import EngineClient, EngineState
from kvferry_runtime.engine.messages import EngineConfig
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.leg import Sampling

pytestmark = pytest.mark.processes


def make_client() -> EngineClient:
    return EngineClient(EngineConfig(model="toy", model_digest="", threads=1, log_level="WARNING"))


@pytest.mark.usefixtures("open_files")
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.5])
async def test_closing_while_it_starts(after_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the process is there, before it has its socket, and while it loads."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {child.pid for child in psutil.Process().children()}
    client = make_client()
    client.start()
    await asyncio.sleep(after_s)
    with pytest.raises(EngineGoneError):
        client.submit(
            Submit(
                key=LegKey("a", 0),
                kind="generate",
                prompt_ids=(1,),
                emitted=((),),
                sampling=Sampling(seed=0, max_tokens=1),
                extras=KeyExtras(),
                deadline_s=1.0,
                eos_token_ids=(),
            )
        )
    with pytest.raises(EngineGoneError):
        await client.snapshot()
    async with asyncio.timeout(3):
        await client.close()
        await client.close()
    assert client.state is EngineState.STOPPED
    assert {child.pid for child in psutil.Process().children()} <= before
    assert not os.listdir(tmp_path)


async def test_the_working_directory_shadows_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is started where files are named like our libraries imports the libraries."""
    for name in ("torch", "msgspec", "kvferry_runtime"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    client = make_client()
    client.start()
    try:
        async with asyncio.timeout(30):
            await client.wait_ready()
        assert client.starts == 1
    finally:
        await client.close()


def closes_on_exec(pid: int, fd: str) -> bool:
    (flags,) = re.findall(r"flags:\s+(\d+)", Path(f"/proc/{pid}/fdinfo/{fd}").read_text())
    return bool(int(flags, 8) & os.O_CLOEXEC)


async def test_nothing_of_the_engine_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process can reach the socket, and the engine hands it to none of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = make_client()
    client.start()
    try:
        async with asyncio.timeout(30):
            await client.wait_ready()
        assert not os.listdir(tmp_path)
        assert client.pid is not None
        inherited = psutil.Process(client.pid).cmdline()
        fd = inherited[inherited.index("--link-fd") + 1]
        assert closes_on_exec(client.pid, fd)
    finally:
        await client.close()


SERVER = """
    import asyncio, sys, tempfile
    from kvferry_runtime.engine.client import EngineClient
    from kvferry_runtime.engine.messages import EngineConfig
    tempfile.tempdir = sys.argv[1]
    async def main():
        client = EngineClient(EngineConfig(model="toy", model_digest="", threads=1))
        client.start()
        await asyncio.sleep(0.01)
        print(client.pid, flush=True)
        await asyncio.sleep(60)
    asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.0, 0.4])
def test_kill_9_of_the_server_while_the_engine_starts_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    """The engine ends, and has left no file."""
    code = textwrap.dedent(SERVER)
    server = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        engine = psutil.Process(int(server.stdout.readline()))
        server.stdout.close()
        time.sleep(after_s)
    finally:
        server.kill()
        server.wait()
    _, alive = psutil.wait_procs([engine], 10)
    assert not alive
    assert not os.listdir(tmp_path)
