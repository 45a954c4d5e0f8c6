"""The flags of ``python -m kvferry_runtime.server`` (``kvferry serve``), as one frozen value.

Every bad flag is reported, all together: its name, what was given, what is accepted.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvferry_runtime.model.toy_spec import is_toy_name
from kvferry_runtime.server.flags import (
    Flag,
    FlagError,
    address,
    choice,
    help_text,
    number,
    parse_flags,
    path,
    seconds,
    size,
    text,
)
from kvferry_service.http_app import is_loopback
from kvferry_wire.limits import DEFAULT_LIMITS, Limits
from kvferry_wire.pod import Role

PROG = "kvferry serve"
_PORT = number(0, 65535)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One pod. Zero means "chosen at the start" wherever a flag's help says so."""

    model: str
    served_name: str
    role: Role
    host: str
    advertised_host: str
    port: int
    control_port: int
    data_port: int
    state_port: int
    keys_dir: Path | None
    dtype: str
    attention: str
    threads: int
    threads_why: str
    block_size: int
    kv_blocks: int
    kv_memory: int
    max_model_len: int
    max_running: int
    token_budget: int
    prefix_caching: bool
    checksums: bool
    parent_fd: int | None
    ready_file: Path | None
    log_json: bool | None
    log_level: str
    drain_s: float
    limits: Limits


FLAGS: tuple[Flag, ...] = (
    Flag("--model", text(), None, "a model folder, a .gguf file, or toy[:key=value,...]"),
    Flag("--served-name", text(), "", "the name that clients use; default: the last part of the model's path"),
    Flag("--role", choice("prefill", "decode", "both"), "both", "what the pod is for; a policy over one engine"),
    Flag("--host", address(), "127.0.0.1", "address to listen on; without keys only a loopback one"),
    Flag("--advertise-host", text(), "", "address that handles name to other pods; default: --host"),
    Flag("--port", _PORT, 8000, "HTTP; 0 takes a free port"),
    Flag("--control-port", _PORT, 0, "KV control; 0 takes a free port; opened only with keys"),
    Flag("--data-port", _PORT, 0, "KV data; 0 takes a free port; opened only with keys"),
    Flag("--state-port", _PORT, 0, "KV events and load; 0 takes a free port; opened only with keys"),
    Flag("--keys-dir", path(), None, "folder of the key files; without it only /v1 on a loopback address"),
    Flag("--dtype", choice("auto", "float32", "bfloat16"), "auto", "what the model computes in"),
    Flag("--attention", text(), "auto", "attention back end"),
    Flag("--threads", number(0, 1024), 0, "compute threads; 0: OMP_NUM_THREADS, or the cores of this process"),
    Flag("--block-size", number(1, 1024), 16, "token slots of a KV block"),
    Flag("--kv-blocks", number(1, 2**31), 0, "usable KV blocks", unset=0),
    Flag("--kv-memory", size(), 0, "memory of the KV blocks, such as 512MiB; not with --kv-blocks", unset=0),
    Flag("--max-model-len", number(2, 2**31), 0, "tokens of a prompt and its answer; default: the model's", unset=0),
    Flag("--max-running", number(1, 4096), 64, "sequences that run at the same time"),
    Flag("--token-budget", number(1, 2**20), 0, "tokens of one step; default: half a second of computing", unset=0),
    Flag("--no-prefix-caching", None, False, "compute every prompt anew"),
    Flag("--no-checksums", None, False, "give KV to other pods without checksums of its blocks"),
    Flag("--lease", seconds(0.1, 3600), DEFAULT_LIMITS.lease_s, "seconds that prefilled KV is kept without a renewal"),
    Flag("--request-deadline", seconds(1, 86400), DEFAULT_LIMITS.request_deadline_s, "seconds a request may take"),
    Flag("--drain", seconds(0, 3600), 8.0, "seconds from SIGTERM for running legs to end or to move, and for leases"),
    Flag("--parent-fd", number(0, 2**20), None, "descriptor that ends when the parent dies"),
    Flag("--ready-file", path(), None, "JSON with ports and pids, written when the pod is ready"),
    Flag("--log-format", choice("auto", "json", "text"), "auto", "auto: text on a terminal, else JSON lines"),
    Flag("--log-level", choice("debug", "info", "warning", "error"), "info", "least level of log lines"),
)


def usage() -> str:
    """The text of ``--help``."""
    return help_text(PROG, "One pod: an OpenAI-compatible API server and its engine.", FLAGS)


def parse(argv: list[str], env: dict[str, str] | None = None) -> ServerConfig:
    """Read the flags.

    Args:
        argv: without the program's name. ``MODEL_DIR`` may stand first in place of ``--model``.
        env: for ``OMP_NUM_THREADS``; the process's own by default.

    Raises:
        FlagError: with every fault.
    """
    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    values, faults = parse_flags(argv, FLAGS)
    faults += _cross_faults(values)
    if faults:
        raise FlagError(faults)
    # One spelling for HTTP and ZMQ alike: the latter binds addresses only.
    host = "127.0.0.1" if values["host"] == "localhost" else values["host"]
    threads, threads_why = _threads(values["threads"], os.environ if env is None else env)
    limits = Limits(lease_s=values["lease"], request_deadline_s=values["request_deadline"])
    return ServerConfig(
        model=values["model"],
        served_name=values["served_name"] or served_name_of(values["model"]),
        role=cast(Role, values["role"]),
        host=host,
        advertised_host=values["advertise_host"] or host,
        port=values["port"],
        control_port=values["control_port"],
        data_port=values["data_port"],
        state_port=values["state_port"],
        keys_dir=values["keys_dir"],
        dtype=values["dtype"],
        attention=values["attention"],
        threads=threads,
        threads_why=threads_why,
        block_size=values["block_size"],
        kv_blocks=values["kv_blocks"],
        kv_memory=values["kv_memory"],
        max_model_len=values["max_model_len"],
        max_running=values["max_running"],
        token_budget=values["token_budget"],
        prefix_caching=not values["no_prefix_caching"],
        checksums=not values["no_checksums"],
        parent_fd=values["parent_fd"],
        ready_file=values["ready_file"],
        log_json={"auto": None, "json": True, "text": False}[values["log_format"]],
        log_level=values["log_level"].upper(),
        drain_s=values["drain"],
        limits=limits,
    )


def served_name_of(model: str) -> str:
    """The name that a model gets when none is given: the last part of its path; ``toy`` for any toy."""
    if is_toy_name(model):
        return "toy"
    return Path(model).resolve().name if Path(model).exists() else model.rstrip("/").rsplit("/", 1)[-1]


def _cross_faults(values: dict[str, Any]) -> list[str]:
    faults = []
    if values.get("kv_blocks") and values.get("kv_memory"):
        faults.append("--kv-blocks and --kv-memory: both given; one of them is accepted")
    if values.get("keys_dir") is None:
        host, role = values.get("host"), values.get("role")
        if host is not None and not is_loopback(host):
            faults.append(f"--host: {host} given without --keys-dir; a loopback address is accepted, or give keys")
        if role in ("prefill", "decode"):
            faults.append(f"--role: {role} given without --keys-dir; 'both' is accepted, or give keys")
    budget, running = values.get("token_budget"), values.get("max_running")
    if budget and running and budget < running:
        faults.append(f"--token-budget: {budget} given; at least --max-running ({running}) is accepted")
    return faults


def _threads(given: int, env: "os._Environ[str] | dict[str, str]") -> tuple[int, str]:
    if given:
        return given, "--threads"
    from_env = env.get("OMP_NUM_THREADS", "")
    if from_env.isdigit() and int(from_env) > 0:
        return int(from_env), "OMP_NUM_THREADS"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, "the cores of this process"
