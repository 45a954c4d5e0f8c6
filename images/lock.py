"""Writes what each image installs, with digests, from `uv.lock` into `images/requirements` (`make images-lock`).

The images then need pip alone, and `pip --require-hashes` refuses whatever is not what was tested.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "images" / "requirements"
HEADER = "# Written by `make images-lock` from uv.lock; a test fails when it is stale.\n"
# Of PyPI's torch for x86-64: without it, the parts that only a CUDA build needs.
CUDA = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
RUNTIME = ("--extra", "runtime", "--extra", "s3")
FILES: dict[str, tuple[str, ...]] = {
    "wheel.txt": ("--only-group", "wheel"),
    "operator.txt": ("--extra", "operator"),
    "router.txt": ("--extra", "router"),
    "runtime-cuda.txt": RUNTIME,
    "runtime-cpu.txt": RUNTIME,  # without torch and its CUDA parts
}


def locked() -> dict[str, str]:
    """Name and version of every package of the lock."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]
    return {package["name"]: package["version"] for package in packages if "version" in package}


def requirements(uv: Path) -> dict[str, str]:
    """Content of each file, by its name. Nothing is asked of the network."""
    versions = locked()
    without = [option for name in versions if CUDA.fullmatch(name) for option in ("--no-emit-package", name)]
    made = {
        name: HEADER + _export(uv, *given, *(without if name == "runtime-cpu.txt" else ()))
        for name, given in FILES.items()
    }
    return {**made, "torch-cpu.txt": f"{HEADER}torch=={versions['torch']}\n"}


def _export(uv: Path, *given: str) -> str:
    command = [
        str(uv),
        "export",
        "--frozen",
        "--offline",
        "--no-dev",
        "--no-emit-project",
        "--no-header",
        "--no-annotate",
    ]
    done = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
    return done.stdout


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, content in requirements(Path(sys.executable).with_name("uv")).items():
        (FOLDER / name).write_text(content, "utf-8")


if __name__ == "__main__":
    main()
