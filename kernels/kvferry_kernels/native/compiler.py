"""The system's C++ compiler, and the sources compiled with it."""

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
UNIT = "kernels.cpp"
_NAMES = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    # Products and sums are fused everywhere alike, so that equal rows give equal bits whatever tile they are in.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w"),
)
_SAID = 200  # characters of a compiler's message that a reason quotes
BUILD_S = 90.0  # for the compiler; it takes 4 s on an idle core
_VERSION_S, _TEST_S = 10.0, 30.0

# Loads the library and lets it check itself; a crash is this process's alone.
_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).kvf_self_test())"


class BuildError(Exception):
    """No library could be made; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that answered."""

    command: tuple[str, ...]
    version: str  # the first line that it says of itself

    @classmethod
    def find(cls, env: Mapping[str, str] | None = None) -> "Compiler":
        """``$CXX``, or the first of c++, g++ and clang++ that is there. Raises ``BuildError``."""
        environ = os.environ if env is None else env
        given = shlex.split(environ.get("CXX", ""))
        candidates = [given] if given else [[name] for name in _NAMES]
        for first, *rest in candidates:
            path = shutil.which(first, path=environ.get("PATH"))
            if path is not None:
                command = (path, *rest)
                said = _run([*command, "--version"], _VERSION_S, SOURCES).strip()
                return cls(command, said.splitlines()[0] if said else "no version")
        looked = shlex.join(given) if given else ", ".join(_NAMES)
        raise BuildError(f"no C++ compiler ({looked}) was found")

    def compile(self, machine: Sequence[str], to: Path, timeout: float) -> None:
        """Compile the sources into the shared library ``to``.

        Args:
            machine: flags that say for which CPU, such as ``native_flags()``.

        Raises:
            BuildError: the compiler failed or took too long.
        """
        command = [*self.command, *_FLAGS, *machine, "-o", str(to), str(SOURCES / UNIT)]
        _run(command, timeout, to.parent)

    def key(self, machine: Sequence[str]) -> str:
        """A name for what would come out: of sources, flags, compiler and this CPU."""
        parts = (sources_digest(), *_FLAGS, *machine, *self.command, self.version, cpu_identity())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def native_flags() -> tuple[str, ...]:
    """For this very CPU."""
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64", "i686") else ("-mcpu=native",)


def check(library: Path) -> None:
    """Let a library check itself in a process of its own. Raises ``BuildError`` with what happened."""
    _run([sys.executable, "-I", "-S", "-c", _CHECK, str(library)], _TEST_S, library.parent)


@cache
def sources_digest() -> str:
    """Of all source files, names included: hexadecimal SHA-256."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@cache
def cpu_identity() -> str:
    """What "native" means here: the CPU's kind and its features."""
    fields = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        first = ""
    pairs = (line.partition(":") for line in first.splitlines())
    known = [f"{key.strip()}={value.strip()}" for key, _, value in pairs if key.strip() in fields]
    return "\n".join((platform.machine(), *(known or [platform.processor()])))


def _run(command: Sequence[str], timeout: float, folder: Path) -> str:
    """What a program prints on standard output. It and its children are killed at the end of their time."""
    name = Path(command[0]).name
    # The compiler's own temporary files stay in the folder too: nothing of ours lies where others write.
    env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TMPDIR": str(folder)}
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own compiler, and this Python
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(f"{name} cannot be started: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise BuildError(f"{name} took longer than {timeout:.0f} s") from None
    if process.returncode < 0:
        raise BuildError(f"{name} was ended by signal {-process.returncode}")
    if process.returncode:
        said = next((line for line in err.decode("utf-8", "replace").splitlines() if "error" in line.lower()), "")
        raise BuildError(f"{name} failed with status {process.returncode}{': ' + said.strip()[:_SAID] if said else ''}")
    return out.decode("utf-8", "replace")
