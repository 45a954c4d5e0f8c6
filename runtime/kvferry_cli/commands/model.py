"""``kvferry model fetch``: bring a model to this machine."""

import argparse
import sys
from pathlib import Path

from kvferry_cli.arguments import HelpFormatter
from kvferry_cli.errors import ExitCode
from kvferry_cli.models import fetch_model, parse_model_argument

FETCH_DESCRIPTION = """\
Bring a model to this machine, check its files, and print where it lies. A download that was cut goes on where it
stopped; a model that is there already is only checked.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "model", help="models on this machine", description="Models on this machine.", formatter_class=HelpFormatter
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    fetch = actions.add_parser(
        "fetch", help="bring a model to this machine", description=FETCH_DESCRIPTION, formatter_class=HelpFormatter
    )
    fetch.add_argument(
        "name",
        metavar="NAME",
        help="demo:smollm2 (the demo model), a hub id (org/name), or a local folder or file",
    )
    fetch.add_argument("--quiet", action="store_true", help="show no progress bar")
    fetch.set_defaults(run=run_fetch)


def run_fetch(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    source = parse_model_argument(args.name)
    path = fetch_model(source, Path.cwd(), progress=not args.quiet)
    print(path)
    sys.stdout.flush()
    return ExitCode.OK
