"""A pod of the plan as this machine runs it: a command line, an environment, ports on 127.0.0.1."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from kvferry_cli.local.ports import HOST, PodPorts
from kvferry_cli.local.state_dir import StateDir
from kvferry_operator.plan import PodPlan, ServicePlan, Slot


class LocalPod(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher starts and watches."""

    name: str
    role: Literal["prefill", "decode", "router"]
    argv: tuple[str, ...]
    env: dict[str, str]  # over the launcher's own environment
    ports: dict[str, int]
    ready_path: str = "/readyz"
    ready_file: Path | None = None  # written by an engine at each of its starts
    cores: tuple[int, ...] = ()  # that its processes may run on; empty: those of the launcher


def render(
    plan: ServicePlan,
    ports: PodPorts,
    state: StateDir,
    *,
    model: str,
    api_keys_file: Path | None,
    log_format: Literal["text", "json"],
) -> tuple[LocalPod, ...]:
    """The plan as local processes.

    Args:
        ports: of each pod.
        state: where keys and the router's discovery lie.
        model: the model as a folder, a file, or the toy's name.
        api_keys_file: of the router's clients, if they need keys.
        log_format: of all pods.
    """
    values = {Slot.HOST: HOST, Slot.MODEL: model, Slot.PODS_FILE: str(state.pods_file)}
    if api_keys_file is not None:
        values[Slot.API_KEYS_FILE] = str(api_keys_file)
    return tuple(_pod(pod, ports[pod.name], state, values, log_format) for pod in plan.pods)


def _pod(
    pod: PodPlan, ports: Mapping[str, int], state: StateDir, common: Mapping[Slot, str], log_format: str
) -> LocalPod:
    values = {
        **common,
        Slot.KEYS_DIR: str(state.router_keys if pod.role == "router" else state.keys),
        **{port.slot: str(ports[port.name]) for port in pod.ports},
    }
    ready_file = None if pod.role == "router" else state.ready_file(pod.name)
    own = [] if ready_file is None else ["--ready-file", str(ready_file)]
    return LocalPod(
        name=pod.name,
        role=pod.role,
        # -P: a folder of the working directory is never imported in place of a module.
        argv=(sys.executable, "-P", "-m", pod.module, *pod.rendered(values), *own, "--log-format", log_format),
        env={"PYTHONUNBUFFERED": "1", **dict(pod.env)},
        ports=dict(ports),
        ready_path=pod.probes.ready,
        ready_file=ready_file,
    )


def discovery(pods: tuple[LocalPod, ...]) -> bytes:
    """The router's discovery file: the engine pods and where they listen."""
    entries = [
        {"name": pod.name, "role": pod.role, "host": HOST, "http": pod.ports["http"], "state": pod.ports["state"]}
        for pod in pods
        if pod.role != "router"
    ]
    return msgspec.json.format(msgspec.json.encode({"pods": entries}), indent=2)


def environment(pod: LocalPod) -> dict[str, str]:
    """The whole environment of the pod's process."""
    return {**os.environ, **pod.env}
