"""Argument types and options that several commands share."""

import argparse
import math
from pathlib import Path

RUNNING = "the one that runs from .kvferry here, else the only one that runs"  # a default of --state-dir


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the descriptions' line breaks and shows every default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or action.required:
            return action.help
        return super()._get_help_string(action)


def port(text: str) -> int:
    """A TCP port, or 0 for a free one."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepts a port from 1 to 65535, or 0 for a free one")
    return number


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number <= 86400:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepts seconds from 0.001 to 86400")
    return number


def finite(text: str) -> float:
    """A number that is neither infinite nor NaN."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"got {text!r}; accepts a number")
    return number


def add_state_dir(parser: argparse.ArgumentParser, *, default: str) -> None:
    """The option ``--state-dir``; ``default`` says in words what is used without it."""
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help=f"folder with the service's ports, keys, process ids and logs (default: {default})",
    )
