"""From a plan to a running local service: keys, ports, discovery, leftovers of an earlier run, then the launcher."""

import sys
from pathlib import Path
from typing import Literal

import msgspec

from kvferry_cli.errors import UserError
from kvferry_cli.local import registry
from kvferry_cli.local.background import Reporter
from kvferry_cli.local.identity import kill_trees, own_identity
from kvferry_cli.local.launcher import Launcher
from kvferry_cli.local.logs import Screen
from kvferry_cli.local.pod import LocalPod, discovery, render
from kvferry_cli.local.ports import PodPorts, allocate, endpoint_of
from kvferry_cli.local.preflight import api_keys_file, check_model
from kvferry_cli.local.relocate import Relocator
from kvferry_cli.local.state_dir import STATE_VERSION, ServiceRecord, StateDir, write_atomically
from kvferry_cli.local.supervisor import Policy
from kvferry_cli.program import command
from kvferry_operator.plan import ServicePlan
from kvferry_service.key_files import KeyFileError, copy_keys, create_keys

ROUTER_KEYS = ("http", "state", "hash")
GIVE_UP_AFTER = 3


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """All that a service needs before its first process."""

    pods: tuple[LocalPod, ...]
    record: ServiceRecord
    state: StateDir
    notes: tuple[str, ...]
    relocator: Relocator


def prepare(plan: ServicePlan, state: StateDir, *, manifest: Path, model: str, port: int | None) -> Prepared:
    """Make keys, ports and discovery in the locked state folder. Raises ``UserError``."""
    check_model(model)
    api_keys = api_keys_file(plan, manifest.parent)
    notes = list(plan.notes)
    if (old := state.read_state()) is not None:
        left = kill_trees(pod.process for pod in old.pods if pod.process is not None)
        if left:
            notes.append(f"ended {len(left)} processes that an earlier run had left: {', '.join(map(str, left))}")
        state.forget_state()
    endpoint_port = plan.port if port is None else port
    ports = allocate(plan, state.ports_file, endpoint_port)
    try:
        create_keys(state.keys)
        copy_keys(state.keys, state.router_keys, ROUTER_KEYS)
    except (KeyFileError, OSError) as error:
        raise UserError(f"keys of the service: {error}") from None
    log_format: Literal["text", "json"] = "text" if sys.stdout.isatty() else "json"

    def rendered(given: PodPorts) -> tuple[LocalPod, ...]:
        return render(plan, given, state, model=model, api_keys_file=api_keys, log_format=log_format)

    pods = rendered(ports)
    write_atomically(state.pods_file, discovery(pods))
    record = ServiceRecord(
        version=STATE_VERSION,
        service=plan.name,
        model=plan.model_name,
        manifest=str(manifest),
        revision=plan.revision,
        endpoint=endpoint_of(ports["router"]),
        auth=plan.auth,
        state="starting",
        launcher=own_identity(),
        pods=(),
    )
    relocator = Relocator(ports, state, rendered, fixed=endpoint_port)
    return Prepared(pods=pods, record=record, state=state, notes=tuple(notes), relocator=relocator)


async def run_service(prepared: Prepared, reporter: Reporter) -> str:
    """Run a prepared service to its end; returns why it failed, or an empty string."""
    screen = Screen([pod.name for pod in prepared.pods], quiet=reporter.background)
    record, state = prepared.record, prepared.state
    screen.say(f"service {record.service}, model {record.model}, state in {state.path}")
    for note in prepared.notes:
        screen.say(note)
    if warning := registry.announce(state):
        screen.say(warning)

    def on_ready() -> None:
        screen.say(welcome(launcher.record, state))
        reporter.ready()

    # In the background nobody watches a pod that cannot start; on a terminal somebody does, and may mend the cause.
    # What can never work is given up in either case.
    policy = Policy(give_up_after=GIVE_UP_AFTER if reporter.background else None)
    try:
        move = prepared.relocator.move
        launcher = Launcher(prepared.pods, state, record, screen, policy, on_ready=on_ready, move=move)
        outcome = await launcher.run()
        reporter.ended(outcome.failure)
    finally:
        if state.held():  # else another service may run from there by now
            registry.withdraw(state)
            state.forget_state()
        screen.close()
    return outcome.failure


def welcome(record: ServiceRecord, state: StateDir) -> str:
    """What is shown when the service is ready."""
    key = "" if record.auth == "none" else " -H 'authorization: Bearer API_KEY'"
    body = f'{{"model": "{record.model}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
    return "\n".join(
        [
            f"ready: {record.endpoint}/v1",
            f"  curl -N {record.endpoint}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'",
            f"  or: {command('chat', '--state-dir', state.path)}",
        ]
    )
