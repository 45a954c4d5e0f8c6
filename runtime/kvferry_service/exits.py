"""How our processes end: their exit statuses, which whoever started them acts on, and the way out."""

import errno
import os
import sys
from typing import NoReturn

UNUSABLE = 2  # arguments, files or the model are at fault: another try would end alike
PORT_TAKEN = 98  # an address to listen on is in use: another port will do, and so may another try


def exit_status(error: BaseException) -> int:
    """The status of a process that this error keeps from starting."""
    return PORT_TAKEN if port_taken(error) else UNUSABLE


def port_taken(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that an address is in use."""
    while error is not None:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            return True
        error = error.__cause__
    return False


def leave(status: int) -> NoReturn:
    """End a process whose own things are closed, without the interpreter's tidying.

    That takes half a second of CPU where much was loaded, in which a pod with little grace left would be killed, and it
    may wait for threads of libraries.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
