"""``kvferry ps``: the processes of a running service."""

import argparse

import msgspec

from kvferry_cli.arguments import RUNNING, HelpFormatter, add_state_dir
from kvferry_cli.errors import ExitCode, UserError
from kvferry_cli.local import registry
from kvferry_cli.local.state_dir import PodRecord, ServiceRecord, StateDir

DESCRIPTION = """\
Show each process of a running service: name, role, pid, ports, state, restarts. The states are waiting, starting,
ready, unready, backoff, stopping and stopped; restarts are those of the process and of the engine inside it. Exits
with 3 when no service runs.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "ps", help="show the processes of a running service", description=DESCRIPTION, formatter_class=HelpFormatter
    )
    add_state_dir(parser, default=RUNNING)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the reasons of each state")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    state = registry.find(args.state_dir)
    record = current(state)
    print(as_json(record) if args.json else as_table(record))
    return ExitCode.OK


def current(state: StateDir) -> ServiceRecord:
    """The running service of a state folder. Raises ``UserError`` where none runs, or none that shows its state yet."""
    if not state.runs():
        raise UserError(f"no service runs from {state.path}", ExitCode.NOT_RUNNING)
    record = state.read_state()
    if record is None:
        launcher = state.launcher()
        who = f" (pid {launcher.pid})" if launcher else ""
        raise UserError(f"a service{who} runs from {state.path}, but shows no state yet; try again in a second")
    return record


def as_json(record: ServiceRecord) -> str:
    """The service with its processes as indented JSON."""
    value = {
        "service": record.service,
        "model": record.model,
        "manifest": record.manifest,
        "revision": record.revision,
        "endpoint": record.endpoint,
        "state": record.state,
        "pid": record.launcher.pid,
        "processes": [
            {
                "name": pod.name,
                "role": pod.role,
                "pid": pod.process.pid if pod.process else None,
                "ports": pod.ports,
                "state": pod.state,
                "restarts": pod.restarts,
                "reason": pod.reason,
            }
            for pod in record.pods
        ],
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def as_table(record: ServiceRecord) -> str:
    """The service as a line and its processes as columns."""
    rows: list[tuple[str, ...]] = [("NAME", "ROLE", "PID", "PORTS", "STATE", "RESTARTS", "")]
    rows += [_row(pod) for pod in record.pods]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, (*widths, 0), strict=True)) for row in rows]
    title = (
        f"{record.service}: {record.state}, {record.endpoint}/v1, model {record.model}, launcher {record.launcher.pid}"
    )
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _row(pod: PodRecord) -> tuple[str, ...]:
    ports = ",".join(f"{name}:{number}" for name, number in pod.ports.items())
    pid = str(pod.process.pid) if pod.process else "-"
    reason = pod.reason if pod.state != "ready" else ""
    return (pod.name, pod.role, pid, ports, pod.state, str(pod.restarts), reason[:100])
