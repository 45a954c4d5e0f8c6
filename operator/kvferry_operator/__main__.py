"""``python -m kvferry_operator``: one operator process."""

import logging
import os
import sys
from collections.abc import Sequence

from kvferry_operator.shell.connection import ConnectionSettingsError
from kvferry_operator.shell.options import OptionsError, parse_options
from kvferry_operator.shell.process import serve
from kvferry_service import logs, run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator; returns the exit status: 1 where leadership or a part was lost, 2 for what must be mended."""
    try:
        options = parse_options(list(sys.argv[1:] if argv is None else argv))
    except OptionsError as error:
        sys.stderr.write(f"kvferry_operator: {error}\n")
        return 2
    logs.configure("operator", json_lines=options.log_json, level=options.log_level)
    for library, least in (("kopf", logging.WARNING), ("kopf._core.reactor.running", logging.ERROR)):
        logging.getLogger(library).setLevel(max(least, logging.getLogger().level))

    async def body(stop: run.StopSignal) -> int:
        return await serve(options, stop)

    try:
        status = run.run(body)
    except (ConnectionSettingsError, OSError) as error:
        sys.stderr.write(f"kvferry_operator: {error}\n")
        status = 2
    # The thread of the watches may still be closing its connections: nothing of it matters any more.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
