"""``python -m kvferry_runtime.server``: one pod. See ``--help``."""

import sys
from collections.abc import Sequence

from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.server.app import serve
from kvferry_runtime.server.config import PROG, parse, usage
from kvferry_runtime.server.flags import FlagError
from kvferry_service import exits, logs, run
from kvferry_service.key_files import KeyFileError
from kvferry_text.bundle import BundleError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after an ordered end, 1 for a failure of ours, else of ``kvferry_service.exits``."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "--help" in given or "-h" in given:
        print(usage())  # noqa: T201 - a command line's output
        return 0
    try:
        config = parse(given)
        logs.configure("pod", json_lines=config.log_json, level=config.log_level)
        return run.run(lambda stop: serve(config, stop))
    except FlagError as error:
        for fault in error.faults:
            print(f"{PROG}: {fault}", file=sys.stderr)  # noqa: T201
    except (ModelError, BundleError, KeyFileError, OSError, ValueError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)  # noqa: T201
        return exits.exit_status(error)
    return exits.UNUSABLE


if __name__ == "__main__":
    exits.leave(main())
