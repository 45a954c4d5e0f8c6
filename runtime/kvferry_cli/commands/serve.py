"""``kvferry serve``: one engine, both roles, no router."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvferry_cli.errors import ExitCode, UserError
from kvferry_cli.models import parse_model_argument, resolve_model

DESCRIPTION = """\
Serve a model with one engine: prompts and answers in one pod, no router, the OpenAI API on 127.0.0.1. MODEL is a model
folder, a GGUF file, demo:smollm2, a hub id (org/name), http(s)://HOST/FOLDER/, s3://BUCKET/PREFIX, or toy; it is
fetched first where it must be.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    # Listed here for the help of `kvferry`; its arguments are the engine's (see `serve`).
    commands.add_parser("serve", help="serve a model with one engine, no router", add_help=False)


def serve(argv: Sequence[str]) -> int:
    """Run the command with the engine's flags: checks them, fetches the model, becomes the engine's process."""
    from kvferry_runtime.server.config import parse, usage
    from kvferry_runtime.server.flags import FlagError

    if any(argument in ("-h", "--help") for argument in argv):
        print(f"{usage()}\n\n{DESCRIPTION}", end="")
        return ExitCode.OK
    try:
        config = parse(list(argv))
    except FlagError as error:
        raise UserError(str(error), ExitCode.USAGE) from None
    source = parse_model_argument(config.model)
    model = resolve_model(source, Path.cwd(), progress=True)
    rest = _without_model(argv)
    if source.kind == "hub" and "--served-name" not in {argument.partition("=")[0] for argument in rest}:
        rest += ["--served-name", source.name]
    return _become([sys.executable, "-P", "-m", "kvferry_runtime.server", "--model", model, *rest])


def _become(command: Sequence[str]) -> NoReturn:
    os.execv(command[0], list(command))  # noqa: S606 - the same interpreter, our own module


def _without_model(argv: Sequence[str]) -> list[str]:
    """The arguments but for the model, which stands first or behind ``--model``; they have been checked already."""
    rest = list(argv)
    if rest and not rest[0].startswith("-"):
        return rest[1:]
    for index, argument in enumerate(rest):
        if argument == "--model":
            return rest[:index] + rest[index + 2 :]
        if argument.startswith("--model="):
            return rest[:index] + rest[index + 1 :]
    return rest
