"""The state folder of a local service: lock, keys, ports, logs and the state that ``kvferry ps`` shows.

::

    .kvferry/NAME/           mode 0700
      lock                   held by the launcher as long as it lives; says which process that is
      state.json             the service as it is, written on each change
      ports.json             ports of each pod, kept over restarts
      pods.json              the router's discovery
      ready/NAME.json        what an engine says of itself when it is ready
      keys/all, keys/router  key files; the router's folder has no `kv`
      logs/NAME.log          one per pod, with one older part; logs/launcher.log when detached
"""

import fcntl
import os
import time
from pathlib import Path

import msgspec

from kvferry_cli.errors import UserError
from kvferry_cli.local.identity import ProcessId, own_identity
from kvferry_cli.program import command

STATE_VERSION = 1
LOCK_TRIES, LOCK_PAUSE_S = 10, 0.03


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as ``ps`` shows it."""

    name: str
    role: str
    state: str
    process: ProcessId | None  # None while no process runs
    ports: dict[str, int]
    restarts: int  # of its process, and of the engine inside it
    reason: str  # why it is not ready, or how its last process ended


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``state.json``."""

    version: int
    service: str
    model: str
    manifest: str
    revision: str
    endpoint: str
    auth: str
    state: str
    launcher: ProcessId
    pods: tuple[PodRecord, ...]


class StateDir:
    """Paths and files of one state folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None

    @property
    def keys(self) -> Path:
        """All keys of the service."""
        return self.path / "keys" / "all"

    @property
    def router_keys(self) -> Path:
        """The keys that the router may hold."""
        return self.path / "keys" / "router"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def pods_file(self) -> Path:
        return self.path / "pods.json"

    @property
    def ports_file(self) -> Path:
        return self.path / "ports.json"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    def ready_file(self, pod: str) -> Path:
        """What an engine pod says of itself at each start of its engine."""
        return self.path / "ready" / f"{pod}.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """What the launcher itself writes when it runs in the background."""
        return self.logs / "launcher.log"

    def create(self) -> None:
        """Make the folder, for its owner alone. Raises ``UserError``."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            for folder in (self.logs, self.path / "ready"):
                folder.mkdir(mode=0o700, exist_ok=True)
            ignore = self.path / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
        except OSError as error:
            raise UserError(f"state folder {self.path}: {error.strerror}; choose another with --state-dir") from None

    def lock(self) -> None:
        """Take the folder for this process until it ends. Raises ``UserError`` where another process has it.

        A launcher whose lock file was removed has it still, as long as it lives.
        """
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"{self.lock_file}: {error.strerror}") from None
        try:
            self._take(descriptor)
        except UserError:
            os.close(descriptor)
            raise
        self._lock = descriptor

    def _take(self, descriptor: int) -> None:
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_PAUSE_S)  # `locked` of another process holds it for an instant
        else:
            raise UserError(self._taken())
        me, record = own_identity(), self.read_state()
        if record is not None and record.launcher != me and record.launcher.alive():
            raise UserError(self._taken())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(me), 0)

    def unlock(self) -> None:
        """Give the folder back. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def held(self) -> bool:
        """Whether the folder is this process's still: its lock file was neither removed nor replaced."""
        if self._lock is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._lock), self.lock_file.stat())
        except OSError:
            return False

    def launcher(self) -> ProcessId | None:
        """The launcher that runs from this folder, also where its lock or its state was lost. Raises ``UserError``.

        ``None`` where none runs, or none that could be told (see ``locked``).
        """
        record = self.read_state()
        known = [self._holder() if self.locked() else None, None if record is None else record.launcher]
        return next((identity for identity in known if identity is not None and identity.alive()), None)

    def runs(self) -> bool:
        """Whether a launcher runs from this folder. Raises ``UserError`` where that cannot be found out."""
        return self.locked() or self.launcher() is not None

    def _holder(self) -> ProcessId | None:
        try:
            return msgspec.json.decode(self.lock_file.read_bytes(), type=ProcessId)
        except (OSError, msgspec.DecodeError):
            return None  # let go of meanwhile, or just taken

    def locked(self) -> bool:
        """Whether a launcher holds the lock file now. Raises ``UserError`` where that cannot be found out."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UserError(f"{self.lock_file}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _taken(self) -> str:
        record = self.read_state()
        who = f"service {record.service!r} (pid {record.launcher.pid})" if record else "a service"
        return (
            f"{who} already runs from {self.path}; stop it with `{command('down', '--state-dir', self.path)}`, "
            "or give this one another --state-dir (and --port)"
        )

    def read_state(self) -> ServiceRecord | None:
        """The state as last written; ``None`` where there is none, or one of another version. Raises ``UserError``."""
        try:
            record = msgspec.json.decode(self.state_file.read_bytes(), type=ServiceRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        except OSError as error:
            raise UserError(f"{self.state_file}: {error.strerror}") from None
        return record if record.version == STATE_VERSION else None

    def write_state(self, record: ServiceRecord) -> None:
        """Replace the state."""
        write_atomically(self.state_file, msgspec.json.format(msgspec.json.encode(record), indent=2))

    def forget_state(self) -> None:
        """Remove the state of a service that has been stopped. Idempotent."""
        self.state_file.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file (mode 0600) that readers see whole, old or new."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
