"""``kvferry up``: run an ``InferenceService`` manifest on this machine."""

import argparse
import asyncio
import os
from pathlib import Path

from kvferry_cli.arguments import HelpFormatter, add_state_dir, port, seconds
from kvferry_cli.errors import ExitCode, UserError
from kvferry_cli.local import registry
from kvferry_cli.local.background import Reporter, start_in_background
from kvferry_cli.local.preflight import engine_faults, refuse
from kvferry_cli.local.service import prepare, run_service
from kvferry_cli.local.state_dir import StateDir
from kvferry_cli.models import resolve_model
from kvferry_operator.api import MAX_MANIFEST_BYTES, InferenceService, ManifestError, load_manifest
from kvferry_operator.plan import Observed, PlanError, ServicePlan, plan

DESCRIPTION = """\
Run an InferenceService manifest on this machine: its prefill and decode pods and a router, each a process tree of its
own, on 127.0.0.1. Pods that end are started again. Ctrl-C (or SIGTERM) stops router, decode and prefill in this
order; a second one kills what is left. Nothing outlives this command, however it ends.

The model is fetched first, once. Pods' output is shown with their names in front, and kept in the state folder.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "up", help="run a manifest on this machine", description=DESCRIPTION, formatter_class=HelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the manifest; docs/manifest.md explains its fields")
    parser.add_argument(
        "--port",
        type=port,
        metavar="N",
        help="port of the endpoint on 127.0.0.1; 0 takes a free one (default: spec.router.port)",
    )
    add_state_dir(parser, default=".kvferry/NAME beside the manifest, by the name in its metadata")
    parser.add_argument("--detach", action="store_true", help="return when the service is ready, and leave it running")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="with --detach: stop the service and fail when it is not ready by then",
    )
    parser.add_argument("--background-fd", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    reporter = Reporter(args.background_fd)
    try:
        return _run(args, reporter)
    except UserError as error:
        reporter.ended(str(error), code=error.code, located=error.located)
        raise


def _run(args: argparse.Namespace, reporter: Reporter) -> int:
    service_plan = planned(args.file)
    own = args.file.absolute().parent / registry.DEFAULT_NAME / service_plan.name
    state = StateDir(own if args.state_dir is None else args.state_dir)
    state.create()
    if args.detach:
        state.lock()  # refuse before anything is downloaded; the background process takes it over
        state.unlock()
    else:
        state.lock()
        reporter.own_log(state.launcher_log)
    base = args.file.absolute().parent
    model = resolve_model(
        service_plan.source,
        base,
        progress=not reporter.background,
        s3_endpoint=service_plan.s3_endpoint,
        s3_region=service_plan.s3_region,
    )
    if args.detach:
        return start_in_background(args, state)
    prepared = prepare(service_plan, state, manifest=args.file.absolute(), model=model, port=args.port)
    if failure := asyncio.run(run_service(prepared, reporter)):
        raise UserError(failure)
    return ExitCode.OK


def planned(file: Path) -> ServicePlan:
    """The plan of a manifest file on this machine. Raises ``UserError`` with every fault."""
    service = read_manifest(file)
    refuse(file, engine_faults(service))
    try:
        return plan(service, Observed(cores=usable_cores()))
    except PlanError as error:
        told = "\n".join(f"{file}: {line}" for line in str(error).splitlines())
        raise UserError(told, ExitCode.USAGE, located=True) from None


def read_manifest(file: Path) -> InferenceService:
    """Read and check a manifest file. Raises ``UserError`` with every fault."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}", ExitCode.USAGE, located=True) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}:{line}: not UTF-8", ExitCode.USAGE, located=True) from None
    try:
        return load_manifest(text, str(file))
    except ManifestError as error:
        raise UserError(str(error), ExitCode.USAGE, located=True) from None


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
