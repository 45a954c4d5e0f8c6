"""Faults of the user or the machine, and the exit codes of ``kvferry``."""

import enum


class ExitCode(enum.IntEnum):
    """What ``kvferry`` exits with."""

    OK = 0
    FAILED = 1  # what was asked for did not work; the message says why
    USAGE = 2  # bad arguments, or a manifest with faults
    NOT_RUNNING = 3  # no service runs where one is needed
    INTERRUPTED = 130  # ended by Ctrl-C before it was done


class UserError(Exception):
    """Ends a command with a message on standard error and an exit code, without a traceback."""

    def __init__(self, message: str, code: int = ExitCode.FAILED, *, located: bool = False) -> None:
        """``located``: each line of the message names its file and is shown as it is."""
        super().__init__(message)
        self.code = code
        self.located = located
