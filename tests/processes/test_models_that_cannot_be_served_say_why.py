"""Each way in which a model cannot be served: the real processes end at once, and the service's status says why.

The processes are those of a pod: the container that fetches, from a web server, and the engine on a volume. What they
leave behind (exit status, last lines) is what a kubelet reports; from that the operator's own status is made.
"""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry_operator.plan.observed import Seen
from kvferry_operator.plan.status import status
from tests.operator.cluster import NOW, Object, make_context, make_pod
from tests.runtime.model.fetch.servers import FileServer, file_server, serve_folder
from tests.support.checkpoints import make_checkpoint

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

TOLD_WITHIN_S = 30.0
TAIL = 2048  # bytes of a log that a kubelet takes for the termination message
SLACK = 24 * 2**20  # beyond what fetching the whole model takes, and twice the file
CANARY = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"
NORM = "model.norm.weight"


def change_config(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def change_header(edit: Callable[[dict[str, dict[str, object]]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return change


def overlap(header: dict[str, dict[str, object]]) -> None:
    begin, end = header[NORM]["data_offsets"]  # type: ignore[misc]
    header[NORM]["data_offsets"] = [begin - 8, end - 8]


def terabyte(header: dict[str, dict[str, object]]) -> None:
    header[NORM] = {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def missing(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def with_code(folder: Path) -> None:
    change_config(auto_map={"AutoModelForCausalLM": "canary.Model"})(folder)
    (folder / "canary.py").write_text(CANARY)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


# Name: what is done to a model; the reason where it is fetched; where it lies on a volume; what the words hold.
FAULTS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    "missing": (missing, "ModelMissing", "ModelMissing", "config.json"),
    "truncated": (truncated, "ModelRefused", "ModelRefused", "truncated"),
    "wrong architecture": (
        change_config(architectures=["MambaForCausalLM"], model_type="mamba"), "ModelRefused", "ModelRefused", "Mamba",
    ),
    "header claims 1 TB": (change_header(terabyte), "ModelRefused", "ModelRefused", "ends at byte 10995"),
    "offsets overlap": (change_header(overlap), "ModelRefused", "ModelRefused", "its place"),
    "auto_map": (with_code, "RemoteCodeRefused", "RemoteCodeRefused", "auto_map"),
    "pickled": (pickled, "ModelMissing", "ModelRefused", "model"),
}  # fmt: skip


class Ended(msgspec.Struct, frozen=True):
    """A process that is over."""

    code: int
    tail: str  # of what it said
    peak: int  # bytes of resident memory; 0 where it did not tell
    seconds: float


# Runs a module, and tells at its end how much memory it has ever had. (What `wait4` says counts the parent's, too.)
MEASURED = """
import atexit, runpy, sys
def tell(where=sys.argv.pop(1)):
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    open(where, "w").write(peak.split()[1])
atexit.register(tell)
sys.argv[0] = sys.argv.pop(1)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run(folder: Path, module: str, *arguments: str, **env: str) -> Ended:
    """Run a process of a pod to its end. ``folder`` is for its own use."""
    told = folder / "peak"
    command = [sys.executable, "-P", "-c", MEASURED, str(told), module, *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    began = time.monotonic()
    done = subprocess.run(
        command, env={**clean, **env}, capture_output=True, text=True, timeout=2 * TOLD_WITHIN_S, check=False
    )
    peak = int(told.read_text()) * 1024 if told.exists() else 0
    return Ended(done.returncode, done.stderr[-TAIL:], peak, time.monotonic() - began)


def status_of(container: str, ended: Ended) -> Object:
    """The service's status when its decode pod has this container, as a kubelet tells of it."""
    context = make_context(spec__prefill=..., spec__model__source="https://models.example.com/m/")
    last = {"terminated": {"exitCode": ended.code, "reason": "Error", "message": ended.tail}}
    crashed = {
        "name": container,
        "ready": False,
        "started": False,
        "restartCount": 1,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": last,
    }
    waiting = {"name": "decode", "ready": False, "state": {"waiting": {"reason": "PodInitializing"}}}
    of_pod = {"init": [crashed], "containers": [waiting]} if container == "fetch-model" else {"containers": [crashed]}
    pod = make_pod("decode", context.plan.revision, **of_pod)
    router = make_pod("router", None, name="demo-router-x", ready=True)
    return status(context, {"decode": 1, "router": 1}, Seen(pods=(pod, router)), {}, NOW)


def ready_of(found: Object) -> tuple[str, str, str]:
    (ready,) = [one for one in found["conditions"] if one["type"] == "Ready"]
    return ready["status"], ready["reason"], ready["message"]


@pytest.fixture(scope="module")
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


def fetch(server: FileServer, folder: Path, into: Path, *flags: str) -> Ended:
    """What the init container does."""
    address = serve_folder(server, folder, f"/{into.name}/")
    into.mkdir()
    return run(into, "kvferry_cli", "model", "fetch", *flags, address, KVFERRY_MODELS=str(into / "models"))


@pytest.fixture(scope="module")
def good(server: FileServer, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A model that can be served, fetched."""
    folder = tmp_path_factory.mktemp("good")
    ended = fetch(server, make_checkpoint(folder / "model"), folder / "fetched")
    assert ended.code == 0, ended.tail
    assert 0 < ended.peak < 512 * 2**20
    return ended


@pytest.mark.parametrize("name", FAULTS)
def test_fetched(server: FileServer, good: Ended, tmp_path: Path, name: str) -> None:
    """Not Ready, with the reason and the words of the fault; no memory was taken for what a header claimed."""
    break_it, reason, _, said = FAULTS[name]
    folder = make_checkpoint(tmp_path / "model")
    size = sum(file.stat().st_size for file in folder.iterdir())
    break_it(folder)
    ended = fetch(server, folder, tmp_path / name.replace(" ", "-"))
    assert ended.seconds < TOLD_WITHIN_S
    state, found, message = ready_of(status_of("fetch-model", ended))
    assert (state, found) == ("False", reason), message
    assert said in message
    assert 0 < ended.peak < good.peak + 2 * size + SLACK
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("name", FAULTS)
def test_on_a_volume(tmp_path: Path, name: str) -> None:
    """The same of the engine, where the model is not fetched: it ends before anything listens."""
    break_it, _, reason, said = FAULTS[name]
    folder = make_checkpoint(tmp_path / "model")
    break_it(folder)
    ended = run(tmp_path, "kvferry_runtime.server", "--model", str(folder), "--served-name", "m", "--port", "0")
    assert ended.seconds < TOLD_WITHIN_S
    state, found, message = ready_of(status_of("decode", ended))
    assert (state, found) == ("False", reason), message
    assert said in message
    assert not list(tmp_path.rglob("ran"))


def test_a_closed_source(server: FileServer, tmp_path: Path) -> None:
    """401: the words tell which field opens it."""
    folder = make_checkpoint(tmp_path / "model")
    server.statuses["/closed/config.json"] = [401] * 9
    ended = fetch(server, folder, tmp_path / "closed")
    assert ready_of(status_of("fetch-model", ended))[:2] == ("False", "ModelAccessDenied")
    assert "spec.model.tokenSecretRef" in ended.tail


def test_a_volume_that_is_too_small(server: FileServer, tmp_path: Path) -> None:
    """What the volume can hold is known before: nothing is written that would not fit."""
    folder = make_checkpoint(tmp_path / "model")
    ended = fetch(server, folder, tmp_path / "small", "--max-bytes", "10000")
    state, reason, message = ready_of(status_of("fetch-model", ended))
    assert (state, reason) == ("False", "DiskFull")
    assert "spec.model.size" in message
