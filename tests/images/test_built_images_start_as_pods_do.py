"""Images that were built, started as a restricted pod starts them: no root, no capability, no file system to write to.

Skipped where no Docker answers or the images are not there: `make images` (or `make images-offline`) makes them.
"""

import json
import os
import shutil
import subprocess
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry_kernels.native import levels
from kvferry_wire.keys import KEY_NAMES
from tests.repo.sources import ROOT
from tests.support.waiting import wait_for

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
REPOSITORY = os.environ.get("REPOSITORY", "kvferry")
TAG = os.environ.get("TAG", VERSION)
PRIVATE = Path("/run/kvferry-docker/docker.sock")  # of e2e/cluster/docker.sh
RESTRICTED = ("--user", "10001:10001", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
ALONE = ("--network", "none", "--tmpfs", "/tmp:size=256m")

ASK = """
import json, sys, urllib.error, urllib.request
path, body = sys.argv[1], sys.argv[2].encode() or None
request = urllib.request.Request("http://127.0.0.1:8000" + path, body, {"content-type": "application/json"})
try:
    answer = urllib.request.urlopen(request, timeout=20)
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps([answer.status, json.loads(answer.read())]))
"""


def docker(*arguments: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    env = dict(os.environ)
    if PRIVATE.exists():
        env.setdefault("DOCKER_HOST", f"unix://{PRIVATE}")
    return subprocess.run(
        ["docker", *arguments], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def image(target: str) -> str:
    """The image's name; skips where it is not there."""
    if shutil.which("docker") is None:
        pytest.skip("no Docker here; it is needed to start images")
    name = f"{REPOSITORY}/{target}:{TAG}"
    if docker("image", "inspect", name).returncode:
        pytest.skip(f"no image {name}; `make images` or `make images-offline` builds it")
    return name


@contextmanager
def container(target: str, files: Path, *arguments: str) -> Iterator[str]:
    """A container that runs the image's own command in the background; its name."""
    name = f"kvferry-test-{uuid.uuid4().hex[:8]}"
    options = (*RESTRICTED, *ALONE, "--volume", f"{files}:/files:ro")
    started = docker("run", "--detach", "--name", name, *options, image(target), *arguments)
    try:
        assert started.returncode == 0, started.stderr
        yield name
    finally:
        docker("rm", "--force", "--volumes", name)


def ask(name: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Ask a container's own port from within; 0 where nothing listens yet."""
    done = docker("exec", name, "python", "-c", ASK, path, "" if body is None else json.dumps(body))
    if done.returncode:
        running = docker("inspect", "--format", "{{.State.Running}}", name).stdout.strip()
        assert running == "true", docker("logs", name).stderr
        return 0, done.stderr
    status, content = json.loads(done.stdout)
    return status, content


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """What a pod mounts, readable for its user."""
    (tmp_path / "keys").mkdir()
    for name in set(KEY_NAMES) - {"kv"}:
        (tmp_path / "keys" / name).write_text(os.urandom(32).hex())
    (tmp_path / "pods.json").write_text('{"pods": []}')
    settings = {"runtimeImage": "kvferry/runtime:1", "routerImage": "kvferry/router:1"}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
        if os.geteuid() == 0:
            os.chown(path, 10001, 10001)
    return tmp_path


@pytest.mark.parametrize("target", ["operator", "router", "runtime"])
def test_images_hold_what_their_list_says(target: str) -> None:
    """The bill of materials names every distribution; what does not belong there is not there."""
    program = (
        "import importlib.metadata as m, importlib.util as u, json, re;"
        "import glob;"
        "print(json.dumps([[re.sub('[-_.]+', '-', d.metadata['Name']).lower() for d in m.distributions()],"
        "[n for n in ('torch', 'pip', 'kubernetes', 'pytest') if u.find_spec(n)],"
        "json.load(open('/opt/kvferry/sbom.json'))['components'],"
        "glob.glob('/opt/kvferry/**/*.pth', recursive=True)]))"
    )
    done = docker("run", "--rm", *RESTRICTED, *ALONE, "--entrypoint", "python", image(target), "-P", "-c", program)
    assert done.returncode == 0, done.stderr
    installed, found, components, hooks = json.loads(done.stdout)
    assert not hooks, "files that run code whenever Python starts"
    assert set(installed) <= {component["name"] for component in components}
    assert [component for component in components if component["purl"].startswith("pkg:deb/")]
    assert found == {"operator": ["kubernetes"], "router": [], "runtime": ["torch", "pip"]}[target]


def test_the_operator_says_that_it_has_no_cluster(files: Path) -> None:
    """In words, and with the status that a wrong set-up has."""
    arguments = ["--settings-file=/files/settings.json", "--lease-namespace=x", "--identity=y", "--namespaces=default"]
    done = docker("run", "--rm", *RESTRICTED, *ALONE, "--volume", f"{files}:/files:ro", image("operator"), *arguments)
    assert done.returncode == 2
    assert "no API server to talk to" in done.stderr


def test_the_router_is_live_without_pods(files: Path) -> None:
    """And says why it is not ready; told to stop, it ends well."""
    arguments = ["--service-name", "demo", "--model-name", "tiny", "--pods-file", "/files/pods.json"]
    arguments += ["--keys-dir", "/files/keys", "--host", "127.0.0.1", "--port", "8000", "--auth", "none"]
    with container("router", files, *arguments) as name:
        wait_for(lambda: ask(name, "/healthz")[0] == 200, "the router to live", 60)
        assert ask(name, "/readyz") == (503, {"ready": False, "reason": "no pods are known"})
        assert docker("stop", "--time", "20", name).returncode == 0
        assert docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "0"


def test_the_runtime_serves_the_toy_model(files: Path) -> None:
    """From start to answer, with nowhere to write but /tmp."""
    arguments = ["--model", "toy", "--served-name", "toy", "--host", "127.0.0.1", "--port", "8000"]
    with container("runtime", files, *arguments) as name:
        wait_for(lambda: ask(name, "/readyz")[0] == 200, "the engine to be ready", 100)
        status, answer = ask(name, "/v1/completions", {"model": "toy", "prompt": "abc", "max_tokens": 4})
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.skipif(not levels.LEVELS["x86-64-v3"] <= levels.cpu_flags(), reason="needs x86-64 with AVX2")
def test_the_runtime_computes_with_operators_that_came_with_it() -> None:
    """No compiler is there, and none is needed; nothing is written."""
    program = (
        "import shutil; from kvferry_kernels.native.provide import open_library;"
        "opened = open_library(); print(opened.reason, [shutil.which(name) for name in ('c++', 'g++', 'clang++')])"
    )
    done = docker("run", "--rm", *RESTRICTED, *ALONE, "--entrypoint", "python", image("runtime"), "-P", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("built with this package for x86-64-v"), done.stdout
    assert done.stdout.endswith("[None, None, None]\n"), done.stdout


def test_the_runtime_fetches_as_the_init_container_does() -> None:
    """The command line is in the image; a source that is never asked ends with the status of the table."""
    command = ["-P", "-m", "kvferry_cli", "model", "fetch", "http://169.254.169.254/m/"]
    done = docker("run", "--rm", *RESTRICTED, *ALONE, "--entrypoint", "python", image("runtime"), *command)
    assert done.returncode == 14, done.stderr
    assert "never asked" in done.stderr
