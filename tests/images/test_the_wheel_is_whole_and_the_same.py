"""The wheel that the images install: all of our packages, nothing else, and the same bytes each time."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, package_files, packages, shown

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}


def build(folder: Path, **environment: str) -> Path:
    """Build the wheel as the Dockerfile does."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    given = {**ENVIRONMENT, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120, env=given)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_two_builds_are_one(wheel: Path, tmp_path: Path) -> None:
    """Byte for byte, in another folder and another order of environment; the commit's time is the files' time."""
    again = build(tmp_path / "again", PYTHONHASHSEED="7", TZ="Asia/Tokyo")
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()
    dated = build(tmp_path / "dated", SOURCE_DATE_EPOCH="1767225600")
    with zipfile.ZipFile(dated) as archive:
        assert {entry.date_time[0] for entry in archive.infolist()} == {2026}


def test_it_holds_every_package_and_nothing_beside(wheel: Path) -> None:
    """Each source and each `py.typed`; no tests, no byte code, no `.pth`, and no folder that would shadow a module."""
    inside = {name for name in names(wheel) if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in inside} == {package.name for package in packages()}
    sources = {"/".join(Path(shown(file)).parts[1:]) for file in package_files()}
    assert sources <= inside
    assert {f"{package.name}/py.typed" for package in packages()} <= inside
    assert not [name for name in names(wheel) if name.endswith((".pth", ".pyc", ".so")) or name.startswith("operator")]


def test_extras_keep_torch_out_of_the_control_plane(wheel: Path) -> None:
    """What `kvferry[operator]` and `kvferry[router]` ask for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [found for found in archive.namelist() if found.endswith("/METADATA")]
        lines = archive.read(name).decode().splitlines()
    asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    assert {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")} >= {
        "operator", "router", "runtime", "s3",
    }  # fmt: skip
    torch = [line for line in asked if line.startswith("torch")]
    assert torch
    assert {line.partition("extra == ")[2] for line in torch} <= {"'runtime'", "'dev'"}


def test_it_runs_from_the_wheel_alone(wheel: Path) -> None:
    """Unpacked nowhere near the sources, the packages import from it."""
    program = "import kvferry_wire, kvferry_operator.plan, kvferry_cli.main; print(kvferry_wire.__file__)"
    command = [sys.executable, "-S", "-c", f"import site, sys; sys.path[:0] = [{str(wheel)!r}]; site.main(); {program}"]
    found = subprocess.run(command, cwd=wheel.parent, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.startswith(str(wheel))
