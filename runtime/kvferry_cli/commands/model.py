"""``kvferry model fetch``: bring a model to this machine."""

import argparse
import sys
from pathlib import Path

from kvferry_cli.arguments import HelpFormatter
from kvferry_cli.errors import ExitCode, UserError
from kvferry_cli.models import fetch_model, parse_model_argument
from kvferry_wire.fetch import FETCH_EXITS, FetchReason, FetchReport, encode_report

FETCH_DESCRIPTION = """\
Bring a model to this machine, check its files, and print where it lies. A download that was cut goes on where it
stopped; a model that is there already is only checked. docs/models.md tells what each source needs.
"""

_MEANINGS = {
    FetchReason.MISSING: "the source has no such model, revision or file",
    FetchReason.DENIED: "it has, but not for this token or these credentials",
    FetchReason.FAILED: "network, time, or bytes that are not what the source says; another try may do",
    FetchReason.DISK_FULL: "no room, or more than may be fetched",
    FetchReason.REFUSED: "damaged, not supported, or a source that is never asked",
    FetchReason.REMOTE_CODE: "the model wants its own code to run",
}
FETCH_EPILOG = "exit codes beside those of every command:\n" + "".join(
    f"  {status:<4} {reason}: {_MEANINGS[reason]}\n" for reason, status in FETCH_EXITS.items()
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "model", help="models on this machine", description="Models on this machine.", formatter_class=HelpFormatter
    )
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    fetch = actions.add_parser(
        "fetch",
        help="bring a model to this machine",
        description=FETCH_DESCRIPTION,
        epilog=FETCH_EPILOG,
        formatter_class=HelpFormatter,
    )
    fetch.add_argument(
        "name",
        metavar="NAME",
        help="demo:smollm2 (the demo model), a hub id (org/name, hf://org/name@revision), http(s)://HOST/FOLDER/ or the"
        " address of a .gguf file, s3://BUCKET/PREFIX, or a local folder or file",
    )
    fetch.add_argument("--quiet", action="store_true", help="show no progress")
    fetch.add_argument(
        "--max-bytes", type=_bytes, metavar="N", help="refuse a model whose files are larger (default: 4 TiB)"
    )
    fetch.add_argument(
        "--link", metavar="NAME", type=_link, help="make a symbolic link of this name, beside the fetched models, to it"
    )
    fetch.add_argument("--report", type=Path, metavar="FILE", help="write what was fetched into this file, as JSON")
    fetch.set_defaults(run=run_fetch)


def run_fetch(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    source = parse_model_argument(args.name)
    fetched = fetch_model(source, Path.cwd(), progress=not args.quiet, max_bytes=args.max_bytes)
    if args.link is not None:
        _make_link(args.link, fetched.path)
    if args.report is not None:
        from kvferry_runtime.model.folder import open_folder

        digest = open_folder(fetched.path).digest
        report = FetchReport(source=str(source), commit=fetched.commit, digest=digest, bytes=fetched.bytes)
        try:
            args.report.write_bytes(encode_report(report))
        except OSError as error:
            raise UserError(f"--report {args.report}: cannot be written: {error.strerror}") from None
    print(fetched.path)
    sys.stdout.flush()
    return ExitCode.OK


def _make_link(name: str, target: Path) -> None:
    from kvferry_runtime.model.fetch import FetchError, default_root
    from kvferry_runtime.model.fetch.place import point

    root = default_root()
    try:
        # Relative within the folder of models: a volume may be mounted elsewhere later.
        inside = target.relative_to(root) if target.is_relative_to(root) else target.absolute()
        root.mkdir(parents=True, exist_ok=True)
        point(root / name, inside)
    except (OSError, FetchError) as error:
        raise UserError(f"--link {name}: {error}") from None


def _bytes(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepts a number of bytes")
    return int(text)


def _link(text: str) -> str:
    if not text or text.startswith(".") or "/" in text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"got {text!r}; accepts a name without /, not beginning with a dot")
    return text
