"""The Dockerfile and what it installs, read without building: unprivileged, locked, and starting what pods start."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kvferry_operator.plan.manifests.security import USER
from tests.operator.cluster import DEMO, container_of, make_objects, pod_of
from tests.repo.sources import ROOT

FOLDER = ROOT / "images"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()


def script(name: str) -> Any:
    """A program beside the Dockerfile, as a module."""
    spec = importlib.util.spec_from_file_location(f"kvferry_images_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


finish, lock = script("finish"), script("lock")
TARGETS = ("operator", "router", "runtime")
DIGEST = "sha256:" + "ab" * 32
UV = Path(sys.executable).with_name("uv")


class Instruction(msgspec.Struct, frozen=True):
    """One instruction of the Dockerfile, in the stage where it stands."""

    stage: str
    name: str
    text: str


def instructions() -> list[Instruction]:
    """All of them, continued lines joined."""
    found, stage = [], ""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    for line in filter(None, (line.strip() for line in joined.splitlines())):
        name, _, text = line.partition(" ")
        if name == "FROM":
            stage = text.rpartition(" AS ")[2]
        found.append(Instruction(stage, name, text.strip()))
    return found


def parents(stage: str) -> Iterator[str]:
    """A stage and those that it is made from."""
    from_ = {one.stage: one.text.partition(" AS ")[0] for one in instructions() if one.name == "FROM"}
    while stage in from_:
        yield stage
        stage = from_[stage]


def of(target: str, name: str) -> list[str]:
    """The instructions of a name that count for a target, the last one last."""
    line = list(parents(target))[::-1]
    return [one.text for stage in line for one in instructions() if one.stage == stage and one.name == name]


def entry_point(target: str) -> list[str]:
    found: list[str] = json.loads(of(target, "ENTRYPOINT")[-1])
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_nobody_in_particular(target: str) -> None:
    """By number, so that `runAsNonRoot` can be checked; the user that pods name, with a name in the image."""
    assert of(target, "USER") == [f"{USER}:{USER}"]
    assert any(f"kvferry:x:{USER}:{USER}:" in text and "/etc/passwd" in text for text in of(target, "RUN"))


@pytest.mark.parametrize("target", TARGETS)
def test_images_hold_an_environment_and_no_tools(target: str) -> None:
    """One copy from the stage that installed it; nothing is installed or fetched in the image itself."""
    assert of(target, "COPY") == [f"--from={target}-environment /opt/kvferry /opt/kvferry"]
    assert not [text for text in of(target, "RUN") if "install" in text]
    (path,) = re.findall(r"(?<!\w)PATH=(\S+)", " ".join(of(target, "ENV")))
    assert path.startswith("/opt/kvferry/bin:")


def test_nothing_comes_from_an_address_or_as_root_later() -> None:
    """No ADD, no curl, no apt, no second user, no secret as an argument; arguments name the base and what compiles."""
    assert not [one for one in instructions() if one.name in ("ADD", "ONBUILD", "SHELL", "VOLUME")]
    runs = " ".join(one.text for one in instructions() if one.name == "RUN")
    assert not re.search(r"\b(curl|wget|git|apt|apt-get|sudo|chmod|chown)\b", runs)
    assert not re.search(
        r"(?i)token|password|secret", " ".join(one.text for one in instructions() if one.name in ("ARG", "ENV"))
    )
    outside = {one.text.partition(" AS ")[0] for one in instructions() if one.name == "FROM"}
    assert {name for name in outside if name not in {one.stage for one in instructions()}} == {"${BASE}", "${COMPILER}"}


def test_every_install_is_held_by_digests() -> None:
    """Wheels only, from the index that is an argument; ours without any index."""
    installer = (FOLDER / "install.sh").read_text()
    lines = [line for line in installer.splitlines() if line.strip().startswith("install ")]
    assert len(lines) == 3
    assert "--require-hashes" in lines[0]
    assert "torch" in lines[1] and "--no-deps" in lines[1]
    assert lines[2].split()[1:] == ["--no-deps", "--no-index", "/wheel/*.whl"]
    assert "--only-binary=:all:" in installer
    assert re.search(r"--require-hashes --only-binary=:all: --requirement images/requirements/wheel\.txt", DOCKERFILE)


@pytest.mark.parametrize(("target", "role"), [("router", "router"), ("runtime", "decode"), ("runtime", "prefill")])
def test_pods_start_what_the_image_starts(target: str, role: str) -> None:
    """The rendered command is the entry point; arguments come behind it."""
    container = container_of(make_objects(spec__model__source=DEMO), role)
    assert container["command"] == entry_point(target)


def test_the_fetching_container_runs_in_the_runtime_image() -> None:
    """The same interpreter, another module, which that image holds."""
    (fetch,) = pod_of(make_objects(spec__model__source=DEMO), "decode")["initContainers"]
    assert fetch["command"][:-1] == entry_point("runtime")[:-1]
    assert fetch["image"] == container_of(make_objects(spec__model__source=DEMO), "decode")["image"]
    assert (ROOT / "runtime" / fetch["command"][-1] / "__main__.py").is_file()


def test_the_chart_starts_the_operator_as_its_image_does() -> None:
    """The command of the Deployment's template, and images that bear the targets' names."""
    template = (ROOT / "charts/kvferry/templates/deployment.yaml").read_text()
    (command,) = re.findall(r"^\s*command: (\[.*\])$", template, re.MULTILINE)
    assert yaml.safe_load(command) == entry_point("operator")
    values = yaml.safe_load((ROOT / "charts/kvferry/values.yaml").read_text())
    assert {name: image["repository"] for name, image in values["images"].items()} == {
        target: f"kvferry/{target}" for target in TARGETS
    }


@pytest.mark.skipif(not UV.exists(), reason="uv is not installed beside this Python; `make install-dev` brings it")
def test_requirements_are_those_of_the_lock() -> None:
    """`make images-lock` would change nothing."""
    lying = {file.name: file.read_text() for file in (FOLDER / "requirements").iterdir()}
    assert lying == lock.requirements(UV)


def locked(name: str) -> dict[str, str]:
    """What a requirements file installs, by name."""
    lines = (FOLDER / "requirements" / name).read_text().splitlines()
    return dict(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", "\n".join(lines), re.MULTILINE))


def test_each_file_of_the_lock_is_held_by_a_digest() -> None:
    """But for torch of another index, whose files the lock does not know: its version is held."""
    for name in lock.FILES:
        text = (FOLDER / "requirements" / name).read_text()
        for block in re.split(r"\n(?=[a-z])", text)[1:]:
            assert "--hash=sha256:" in block, (name, block[:60])
    assert locked("torch-cpu.txt") == {"torch": lock.locked()["torch"]}


def test_torch_is_in_the_runtime_alone() -> None:
    """And without CUDA's parts where none is asked for."""
    for name in ("operator.txt", "router.txt"):
        assert not {"torch", "numpy", "transformers", "safetensors"} & locked(name).keys()
    assert "kopf" not in locked("router.txt")
    assert "kopf" in locked("operator.txt")
    assert {"torch", "boto3", "pip"} <= locked("runtime-cuda.txt").keys()
    left = locked("runtime-cuda.txt").keys() - locked("runtime-cpu.txt").keys()
    assert "torch" in left
    assert all(lock.CUDA.fullmatch(name) for name in left)


def test_the_build_sees_sources_and_nothing_else() -> None:
    """All is ignored but what the Dockerfile copies; no folder of a virtual environment, no repository, no cache."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    let_in = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        word.split("/")[0]
        for one in instructions()
        if one.name == "COPY" and "--from" not in one.text
        for word in shlex.split(one.text)[:-1]
    }
    assert let_in == copied


def test_scripts_are_sound() -> None:
    """They parse, and stop at the first fault."""
    for program in FOLDER.glob("*.sh"):
        subprocess.run(["bash", "-n", str(program)], check=True, timeout=10)
        assert re.search(r"^set -eu", program.read_text(), re.MULTILINE), program.name


@pytest.mark.parametrize(
    ("environment", "arguments", "said"),
    [
        ({}, ["kernel"], "no target kernel"),
        ({"TORCH": "rocm"}, [], "accepts cpu or cuda"),
        ({"RELEASE": "1"}, [], "by digest"),
        ({"RELEASE": "1", "BASE": "python:3.11"}, [], "by digest"),
        ({"RELEASE": "1", "BASE": f"python@{DIGEST}"}, [], "COMPILER=NAME:TAG@sha256"),
        ({"RELEASE": "1", "BASE": f"python@{DIGEST}", "COMPILER": "gcc:12"}, ["runtime"], "COMPILER=NAME:TAG@sha256"),
    ],
)
def test_what_cannot_be_built_is_refused_first(environment: dict[str, str], arguments: list[str], said: str) -> None:
    """Before Docker is asked for anything."""
    command = ["bash", str(FOLDER / "build.sh"), *arguments]
    env = {"PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert said in done.stderr


# Stands for Docker: writes down what it is asked, and knows one image.
FAKE_DOCKER = """#!/bin/sh
echo "$*" >>"$ASKED"
case "$1 $2" in
  "pull "*) exit "${PULLS:-0}" ;;
  "image inspect") case "$*" in *RepoDigests*) echo "${DIGESTS:-}" ;; esac; exit "${INSPECTS:-0}" ;;
esac
"""


def build(tmp_path: Path, *targets: str, **environment: str) -> tuple[int, str, list[str]]:
    """Run the build script before a Docker that only listens: status, what was said, what Docker was asked."""
    (tmp_path / "docker").write_text(FAKE_DOCKER)
    (tmp_path / "docker").chmod(0o755)
    asked = tmp_path / "asked"
    asked.touch()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ASKED": str(asked), "SOURCE_DATE_EPOCH": "1767225600", **environment}
    command = ["bash", str(FOLDER / "build.sh"), *targets]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stderr, asked.read_text().splitlines()


def test_a_tag_is_resolved_once_for_all_images(tmp_path: Path) -> None:
    """Every target is built on the digest that the tag has now; it is said, and stands in the images' labels."""
    status, said, asked = build(tmp_path, "operator", "router", DIGESTS=f"python@{DIGEST}")
    assert status == 0, said
    assert f"on BASE=python:3.11-slim-bookworm@{DIGEST}" in said
    builds = [line for line in asked if line.startswith("build ")]
    assert len(builds) == 2
    for line in builds:
        assert f"--build-arg BASE=python:3.11-slim-bookworm@{DIGEST} " in line + " "
        assert f"--build-arg BASE_DIGEST={DIGEST} " in line + " "
    labels = " ".join(one.text for one in instructions() if one.name == "LABEL")
    assert 'image.base.digest="${BASE_DIGEST}"' in labels
    assert 'image.base.name="${BASE_NAME}"' in labels


def test_only_the_runtime_needs_a_compiler(tmp_path: Path) -> None:
    """Resolved as the base is; the image that engines run in holds the library and not what made it."""
    status, said, asked = build(tmp_path, "router", "runtime", DIGESTS=f"python@{DIGEST}")
    assert status == 0, said
    assert f"on COMPILER=python:3.11-bookworm@{DIGEST}" in said
    assert all(f"--build-arg COMPILER=python:3.11-bookworm@{DIGEST} " in line for line in asked if "build " in line)
    _, said, _ = build(tmp_path, "router", DIGESTS=f"python@{DIGEST}")
    assert "COMPILER" not in said
    assert "operators" not in parents("runtime")
    assert "--from=operators /prebuilt /build/prebuilt" in of("runtime-environment", "COPY")


def test_a_base_by_digest_is_taken_as_it_is(tmp_path: Path) -> None:
    """Nothing is asked for beforehand."""
    status, said, asked = build(tmp_path, "router", BASE=f"mirror.example/python:3.11@{DIGEST}")
    assert status == 0, said
    assert [line.split()[0] for line in asked] == ["build", "image"]
    assert f"--build-arg BASE_NAME=mirror.example/python:3.11 --build-arg BASE_DIGEST={DIGEST}" in asked[0]


def test_a_base_of_this_machine_alone_is_named_so(tmp_path: Path) -> None:
    """Where nothing can be pulled, an image that is here will do, and it is said that it has no digest."""
    status, said, asked = build(tmp_path, "router", BASE="mine", PULLS="1")
    assert status == 0, said
    assert "on BASE=mine of this machine alone, which has no digest" in said
    assert any("--build-arg BASE=mine " in line for line in asked)


def test_a_build_without_a_network_pulls_nothing(tmp_path: Path) -> None:
    """The base is the one that is here."""
    status, said, asked = build(tmp_path, "router", BASE="mine", OFFLINE="1")
    assert status == 0, said
    assert not [line for line in asked if line.startswith("pull")]


def test_a_base_that_is_nowhere_is_told_with_what_is_accepted(tmp_path: Path) -> None:
    """Before any stage is built."""
    status, said, asked = build(tmp_path, "router", BASE="none:1", PULLS="1", INSPECTS="1")
    assert status == 1
    assert "BASE=none:1 cannot be pulled and is not here; accepted: an image of Debian 12 with Python 3.11" in said
    assert not [line for line in asked if line.startswith("build")]


def test_torch_without_cuda_is_not_promised_where_it_cannot_be_had() -> None:
    """Told before anything is fetched, with the arguments that help."""
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
    command = ["bash", str(FOLDER / "offline.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    for word in ("TORCH=cpu", "TORCH_INDEX=URL", "TORCH=cuda", 'TARGETS="operator router"'):
        assert word in done.stderr


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        ("cuda: Optional[str] = None", True),
        ("cuda: str | None = None", True),
        ("cuda = None", True),
        ("cuda: Optional[str] = '12.8'", False),
        ("cudart = None", False),
    ],
)
def test_a_torch_for_cuda_is_not_taken_for_one_without(tmp_path: Path, line: str, accepted: bool) -> None:
    """An index may have only builds for CUDA, which would install without their parts and fail in the first pod."""
    (pattern,) = re.findall(r"grep -q '(\^cuda.*)' ", (FOLDER / "install.sh").read_text())
    file = tmp_path / "version.py"
    file.write_text(f"__version__ = '2'\n{line}\nhip: Optional[str] = None\n")
    assert (subprocess.run(["grep", "-q", pattern, str(file)], timeout=10, check=False).returncode == 0) == accepted


STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u1
Description: a library
 Package: not this

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1:2~3
"""


def test_the_bill_of_materials_names_everything_once() -> None:
    """Every distribution of this environment, every installed Debian package, the same text for the same content."""
    import importlib.metadata

    site = [path for path in sys.path if path.endswith("site-packages")]
    components: list[dict[str, Any]] = [*finish.python_components(site), *finish.debian_components(STATUS)]
    bill = finish.bill_of_materials(components, 1767225600)
    assert bill == finish.bill_of_materials(components[::-1], 1767225600)
    assert bill["metadata"]["timestamp"] == "2026-01-01T00:00:00Z"
    named = {component["name"] for component in bill["components"]}
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions(path=site)}
    assert named >= {re.sub(r"[-_.]+", "-", name).lower() for name in installed}
    (library,) = [component for component in bill["components"] if component["purl"].startswith("pkg:deb/")]
    assert library["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64"


def test_an_environment_is_finished_the_same_way_twice(tmp_path: Path) -> None:
    """Byte code that needs no source's time, one time for all files, and a list of what is there."""
    trees = []
    for name in ("a", "b"):
        site = tmp_path / name / "lib" / "python3.11" / "site-packages"
        site.mkdir(parents=True)
        (site / "module.py").write_text("x = ['a', 1, (2, 3)]\n")
        (site / "hook.pth").write_text("import module\n")
        finish.finish(tmp_path / name, 1767225600)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        # Byte code names its source: that is the one thing in which the two differ.
        place = str(tmp_path / name).encode()
        trees.append([(path.name, path.read_bytes().replace(place, b"_"), path.stat().st_mtime) for path in files])
    assert trees[0] == trees[1]
    assert not list(tmp_path.rglob("*.pth"))
    assert {mtime for *_, mtime in trees[0]} == {1767225600.0}
    (code,) = (tmp_path / "a").rglob("*.pyc")
    assert code.read_bytes()[4:8] == (1).to_bytes(4, "little")  # by hash, unchecked
