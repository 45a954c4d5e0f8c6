"""A process that finds one of its ports taken ends with a status that says so, and names the port."""

import errno
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry_service.exits import PORT_TAKEN, UNUSABLE, exit_status
from kvferry_service.key_files import create_keys

pytestmark = pytest.mark.processes


def run(module: str, *flags: str) -> tuple[int, str]:
    """Start a process that will end by itself; returns its status and what it said."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module, *flags], capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("flag", ["--port", "--control-port", "--data-port", "--state-port"])
def test_an_engine_says_which_of_its_ports_is_taken(tmp_path: Path, flag: str) -> None:
    """Of its own process and of the engine's."""
    create_keys(tmp_path / "keys")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = ["--model", "toy", "--threads", "1", "--keys-dir", str(tmp_path / "keys"), flag, str(port)]
        status, told = run("kvferry_runtime.server", *flags, *(() if flag == "--port" else ("--port", "0")))
    assert status == PORT_TAKEN, told
    assert f"127.0.0.1:{port}: Address already in use" in told


def test_a_router_says_that_its_port_is_taken(tmp_path: Path) -> None:
    """And ends with another status than for what a user must mend."""
    create_keys(tmp_path / "keys", ("http", "state", "hash"))
    flags = ["--service-name", "s", "--model-name", "m", "--pods-file", "none", "--auth", "none"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, told = run("kvferry_router", *flags, "--keys-dir", str(tmp_path / "keys"), "--port", str(port))
        assert status == PORT_TAKEN, told
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in told
    assert run("kvferry_router", *flags, "--keys-dir", str(tmp_path / "none"))[0] == UNUSABLE


def test_the_cause_of_an_error_counts() -> None:
    """As the transfer raises it; an error without such a cause is the user's to mend."""
    taken = OSError(errno.EADDRINUSE, "in use")
    wrapped = RuntimeError("data port")
    wrapped.__cause__ = taken
    assert (exit_status(taken), exit_status(wrapped)) == (PORT_TAKEN, PORT_TAKEN)
    assert exit_status(OSError(errno.EACCES, "not yours")) == exit_status(ValueError()) == UNUSABLE
