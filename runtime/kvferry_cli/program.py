"""How the user calls ``kvferry``, so that the commands in our messages run as they are printed."""

import shlex
import shutil
import sys
from pathlib import Path

NAME = "kvferry"


def program() -> str:
    """The command as it was typed, or as it must be typed where that is not known; quoted for a shell."""
    given = sys.argv[0]
    if Path(given).parts[-2:] == ("kvferry_cli", "__main__.py"):
        return f"{shlex.quote(sys.executable)} -m kvferry_cli"
    if Path(given).name != NAME:
        return NAME  # called from other code
    found = shutil.which(NAME)
    if found is not None and Path(given).exists() and Path(given).samefile(found):
        return NAME
    return shlex.quote(given)


def command(*words: object) -> str:
    """A command line of ours with these arguments."""
    return " ".join([program(), *(shlex.quote(str(word)) for word in words)])
