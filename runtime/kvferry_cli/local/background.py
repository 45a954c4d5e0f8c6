"""``kvferry up --detach``: start the launcher as a background process and wait until its service is ready."""

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from kvferry_cli.errors import ExitCode, UserError
from kvferry_cli.local.identity import ProcessId, identify, kill_trees, wait_gone
from kvferry_cli.local.state_dir import ServiceRecord, StateDir
from kvferry_cli.program import command

STOP_WAIT_S = 60.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One line from the background process to the command that started it."""

    event: Literal["ready", "ended"]
    failure: str = ""
    code: int = ExitCode.FAILED
    located: bool = False  # see `UserError`


class Reporter:
    """The background process's end of the pipe; in the foreground it does nothing."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self.background = descriptor is not None

    def ready(self) -> None:
        """The service is ready for the first time: the waiting command returns."""
        self._send(Report(event="ready"))

    def ended(self, failure: str, *, code: int = ExitCode.FAILED, located: bool = False) -> None:
        """The service has ended, or was never begun; the other arguments are those of ``UserError``."""
        self._send(Report(event="ended", failure=failure, code=code, located=located))

    def own_log(self, log: Path) -> None:
        """The state folder is ours: what earlier launchers wrote to the log goes."""
        if self.background and log.exists():
            os.truncate(log, 0)

    def _send(self, report: Report) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, msgspec.json.encode(report) + b"\n")
        except BrokenPipeError:
            pass  # the command that waited is gone; the service goes on
        os.close(self._descriptor)
        self._descriptor = None


def start_in_background(args: argparse.Namespace, state: StateDir) -> int:
    """Start ``kvferry up`` in a session of its own; returns when it is ready. Raises ``UserError`` when it fails."""
    read_end, write_end = os.pipe()
    log = state.launcher_log
    # Appended to, not emptied: it may be that of a launcher which takes the folder first (see `Reporter.own_log`).
    with log.open("ab") as output:
        log.chmod(0o600)
        argv = [sys.executable, "-P", "-m", "kvferry_cli", "up", str(args.file), "--state-dir", str(state.path)]
        argv += ["--background-fd", str(write_end)]
        argv += [] if args.port is None else ["--port", str(args.port)]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(write_end,),
        )
    os.close(write_end)
    identity = identify(process.pid)
    try:
        report = wait_for_report(read_end, args.wait)
    except TimeoutError:
        _stop(identity, process)
        raise UserError(f"not ready within {args.wait:g} s{_end_of(log)}") from None
    except KeyboardInterrupt:
        _stop(identity, process)
        raise
    finally:
        os.close(read_end)
    if report is None:
        code = process.wait()
        raise UserError(f"the launcher ended with status {code}{_end_of(log)}")
    if report.event == "ended":
        process.wait()
        why = report.failure or "the service was stopped before it was ready"
        raise UserError(why, report.code, located=report.located)
    record = state.read_state()
    if record is None:
        raise UserError(f"the service ended; its log is {log}")
    _print_started(record, state)
    return ExitCode.OK


def _print_started(record: ServiceRecord, state: StateDir) -> None:
    from kvferry_cli.local.service import welcome

    print(welcome(record, state))
    stop = command("down", "--state-dir", state.path)
    print(f"running in the background as pid {record.launcher.pid}; stop it with: {stop}")


def wait_for_report(descriptor: int, timeout_s: float) -> Report | None:
    """The first report; ``None`` when the process ended without one. Raises ``TimeoutError`` when time is up."""
    deadline = time.monotonic() + timeout_s
    received = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            break
        data = os.read(descriptor, 65536)
        received += data
        if b"\n" in received:
            return msgspec.json.decode(received.partition(b"\n")[0], type=Report)
        if not data:
            return None
    raise TimeoutError


def _stop(identity: ProcessId | None, process: "subprocess.Popen[bytes]") -> None:
    if identity is None:
        return
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_WAIT_S)
    except subprocess.TimeoutExpired:
        kill_trees([identity])
        wait_gone([identity], 5.0)


def _end_of(log: Path, lines: int = 20) -> str:
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""  # the folder is gone, and the log with it
    told = "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
    return f"; the end of {log}:\n{told}"
