"""``kvferry down``: stop a running service, whole."""

import argparse
import signal
import time

from kvferry_cli.arguments import RUNNING, HelpFormatter, add_state_dir, seconds
from kvferry_cli.errors import ExitCode, UserError
from kvferry_cli.local import registry
from kvferry_cli.local.identity import ProcessId, kill_trees, signal_process
from kvferry_cli.local.state_dir import ServiceRecord, StateDir

DESCRIPTION = """\
Stop a running service: router, decode, prefill, in this order. What does not stop in time is killed. Where no service
runs there is nothing to do, and that is no fault.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "down", help="stop a running service", description=DESCRIPTION, formatter_class=HelpFormatter
    )
    add_state_dir(parser, default=RUNNING)
    parser.add_argument(
        "--wait", type=seconds, default=60.0, metavar="SECONDS", help="kill everything that still runs after this time"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    state = registry.find(args.state_dir)
    record = state.read_state()
    if not state.runs():
        left = _kill(record)
        state.forget_state()
        print(f"ended {left} processes that an earlier run had left" if left else f"no service runs from {state.path}")
        return ExitCode.OK
    launcher = state.launcher()
    if launcher is None:
        raise UserError(f"a service is just starting from {state.path}, or stopping; try again in a second")
    name = f"service {record.service}" if record else f"the service of {state.path}"
    signal_process(launcher, signal.SIGTERM)
    if not _wait_ended(state, args.wait):
        left = _kill(record, state.read_state(), launcher=launcher)
        _wait_ended(state, 5.0)
        state.forget_state()
        print(f"{name} did not stop within {args.wait:g} s and was killed ({left} processes)")
        return ExitCode.OK
    print(f"{name} stopped")
    return ExitCode.OK


def _wait_ended(state: StateDir, timeout_s: float) -> bool:
    """Wait until no launcher runs from the folder."""
    deadline = time.monotonic() + timeout_s
    while state.runs():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _kill(*records: ServiceRecord | None, launcher: ProcessId | None = None) -> int:
    """Kill launcher and pods, of the records too; returns how many processes there were."""
    roots = [] if launcher is None else [launcher]
    for record in records:
        if record is not None:
            roots.append(record.launcher)
            roots += [pod.process for pod in record.pods if pod.process is not None]
    return len(kill_trees(roots))
