"""The key files of a service: a folder (mode 0700) with one file (mode 0600) per key, 64 hex digits each."""

import os
import re
import secrets
import stat
from pathlib import Path

from kvferry_wire.keys import KEY_BYTES, KEY_NAMES, ServiceKeys

_HEX = re.compile(r"[0-9a-fA-F]{64}")
_ACCEPTED = f"{2 * KEY_BYTES} hex digits"


class KeyFileError(ValueError):
    """A key file or folder that cannot be used. The message names the path and what is accepted, never a key."""


def load_keys(folder: Path, *, need_kv: bool) -> ServiceKeys:
    """Read a service's keys.

    Args:
        folder: holds the files ``http``, ``state``, ``hash``, and ``kv`` where it is needed.
        need_kv: read ``kv`` as well; a process that needs none (the router) does not even open it.

    Raises:
        KeyFileError: names every missing, readable-by-others or malformed file at once.
    """
    faults: list[str] = []
    found: dict[str, bytes] = {}
    if not folder.is_dir():
        raise KeyFileError(f"{folder}: no such folder; a folder with the key files {', '.join(KEY_NAMES)} is expected")
    for name in KEY_NAMES:
        if name == "kv" and not need_kv:
            continue
        try:
            found[name] = _read_key(folder / name)
        except KeyFileError as error:
            faults.append(str(error))
    if len(set(found.values())) != len(found):
        faults.append(f"{folder}: two keys are equal; each must be drawn on its own")
    if faults:
        raise KeyFileError("; ".join(faults))
    return ServiceKeys(http=found["http"], state=found["state"], hash=found["hash"], kv=found.get("kv"))


def create_keys(folder: Path, names: tuple[str, ...] = KEY_NAMES) -> None:
    """Draw the keys that the folder lacks; those it has are kept. Creates the folder with mode 0700."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name in names:
        _write_new(folder / name, secrets.token_hex(KEY_BYTES))


def copy_keys(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Copy some keys of ``source`` into another folder: the router's holds no ``kv``."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.chmod(0o700)
    for name in names:
        content = _read_key(source / name).hex()
        if (target / name).exists():
            if _read_key(target / name).hex() == content:
                continue
            (target / name).unlink()
        _write_new(target / name, content)


def secret_strings(keys: ServiceKeys) -> list[str]:
    """Every text form of the keys that must not reach a log."""
    held = [keys.http, keys.state, keys.hash, keys.kv]
    return [key.hex() for key in held if key is not None] + [keys.bearer()]


def _read_key(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(4 * KEY_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}; a file with {_ACCEPTED} is expected") from None
    # A group may read it: Kubernetes mounts a Secret with the pod's fsGroup and mode 0440.
    if mode & 0o027:
        raise KeyFileError(f"{path}: mode {mode:04o}; 0600 (or 0440 for a mounted Secret) is expected")
    if not _HEX.fullmatch(content):
        raise KeyFileError(f"{path}: not a key; {_ACCEPTED} are expected, {len(content)} characters were found")
    return bytes.fromhex(content)


def _write_new(path: Path, content: str) -> None:
    """Write a file that appears whole or not at all; one that exists is kept."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(content + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process drew it first; its key is the key
    finally:
        draft.unlink(missing_ok=True)
