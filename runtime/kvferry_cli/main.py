"""The ``kvferry`` command."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from kvferry_cli.arguments import HelpFormatter
from kvferry_cli.commands import bench, chat, down, model, ps, serve, up
from kvferry_cli.errors import ExitCode, UserError

DESCRIPTION = """\
kvferry serves language models with separate pools for prefill and decode: the KV cache that prefill computes is ferried
to decode under leases, behind one OpenAI-compatible endpoint.
"""

EPILOG = """\
exit codes:
  0    done
  1    it did not work; the message says why
  2    bad arguments, or a manifest with faults
  3    no service runs where one is needed
  130  ended by Ctrl-C before it was done
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = argparse.ArgumentParser(
        prog="kvferry", description=DESCRIPTION, epilog=EPILOG, formatter_class=HelpFormatter, allow_abbrev=False
    )
    version = f"kvferry {importlib.metadata.version('kvferry')}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    for command in (up, ps, down, serve, chat, model, bench):
        command.add_parser(commands)
    told = commands.add_parser("version", help="print the version", description="Print the version.")
    told.set_defaults(run=lambda _: print(version) or ExitCode.OK)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["serve"]:
            return serve.serve(given[1:])
        args = build_parser().parse_args(given)
        return int(args.run(args))
    except UserError as error:
        print(error if error.located else f"kvferry: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("kvferry: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `kvferry ps | head -1`
        sys.stderr.close()
        return ExitCode.OK
    except (OSError, ValueError) as error:  # a fault of files or of input that nobody foresaw
        print(f"kvferry: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return ExitCode.FAILED
