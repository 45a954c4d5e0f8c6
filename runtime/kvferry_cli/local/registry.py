"""Where the user's running services are, so that `ps`, `down` and `chat` find one without being told its folder."""

import hashlib
import os
import shlex
from pathlib import Path

from kvferry_cli.errors import ExitCode, UserError
from kvferry_cli.local.state_dir import StateDir

DEFAULT_NAME = ".kvferry"


def registry_dir() -> Path:
    """The folder with one file per running service: ``$XDG_STATE_HOME/kvferry/services``."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    return Path(base) / "kvferry" / "services"


def _entry(state: StateDir) -> Path:
    return registry_dir() / hashlib.sha256(os.fsencode(state.path)).hexdigest()[:16]


def announce(state: StateDir) -> str:
    """Note that a service runs from this folder. Returns why that was not possible, else an empty string."""
    try:
        registry_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        _entry(state).write_bytes(os.fsencode(state.path))
    except OSError as error:
        return f"{registry_dir()}: {error.strerror}; `kvferry ps` will need --state-dir {state.path}"
    return ""


def withdraw(state: StateDir) -> None:
    """The service has ended. Idempotent."""
    try:
        _entry(state).unlink(missing_ok=True)
    except OSError:
        pass  # an entry without a running service is skipped by `running`


def running() -> list[StateDir]:
    """The folders of all services that run now."""
    try:
        entries = sorted(registry_dir().iterdir())
    except OSError:
        return []
    folders = []
    for entry in entries:
        try:
            folders.append(StateDir(Path(os.fsdecode(entry.read_bytes()))))
        except OSError:
            continue  # withdrawn between the listing and the look
    return [folder for folder in folders if _runs(folder)]


def _runs(folder: StateDir) -> bool:
    try:
        return folder.runs()
    except UserError:
        return False  # whose files cannot be read cannot be managed either


def find(given: Path | None) -> StateDir:
    """The state folder that a command means.

    The one given; else the one under ``.kvferry`` here that a service runs from; else the one service that runs; else
    the one folder that lies under ``.kvferry``, or ``.kvferry`` itself.

    Raises:
        UserError: several services run and none was named, or what was named is no folder.
    """
    if given is not None:
        if given.exists() and not given.is_dir():
            raise UserError(f"--state-dir: {given} is no folder", ExitCode.USAGE)
        return StateDir(given)
    own = [StateDir(lock.parent) for lock in sorted(Path(DEFAULT_NAME).glob("*/lock"))]
    candidates = [folder for folder in own if _runs(folder)] or running()
    if len(candidates) > 1:
        listed = "\n".join(f"  --state-dir {shlex.quote(str(folder.path))}" for folder in candidates)
        raise UserError(f"{len(candidates)} services run; say which:\n{listed}", ExitCode.USAGE)
    if candidates:
        return candidates[0]
    return own[0] if len(own) == 1 else StateDir(Path(DEFAULT_NAME))
