"""Which packages can be imported without which libraries, tried in fresh interpreters; and the declared layers."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, packages

# Libraries of the extras: what is installed without them must import without them.
ROUTER_EXTRA = ("aiohttp", "uvloop", "zmq", "jinja2", "tokenizers", "prometheus_client")
OPERATOR_EXTRA = ("kopf", "kubernetes", "aiohttp", "uvloop", "prometheus_client")
RUNTIME_EXTRA = ("torch", "numpy", "safetensors", "gguf", "huggingface_hub", "tqdm", "transformers")

PROGRAM = """
import importlib, pkgutil, sys
packages, blocked = sys.argv[1].split(","), sys.argv[2].split(",")
for name in blocked:
    sys.modules[name] = None
for name in packages:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


def import_all(names: str, blocked: tuple[str, ...]) -> None:
    """Import every module of packages in a new interpreter in which other libraries are not to be had."""
    command = [sys.executable, "-P", "-c", PROGRAM, names, ",".join(blocked)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("name", ["kvferry_wire", "kvferry_operator.api", "kvferry_operator.plan"])
def test_contracts_manifest_and_plan_import_with_the_base_install(name: str) -> None:
    """Neither the operator's, the router's nor the engine's libraries are needed for them."""
    import_all(name, OPERATOR_EXTRA + ROUTER_EXTRA + RUNTIME_EXTRA)


def test_the_operators_process_imports_without_router_and_engine() -> None:
    """The operator's image holds neither."""
    others = set(ROUTER_EXTRA + RUNTIME_EXTRA) - set(OPERATOR_EXTRA)
    import_all("kvferry_operator", tuple(sorted(others)))


def test_the_command_line_imports_with_the_base_install() -> None:
    """Commands bring in what they need when they run; `kvferry --help` needs no torch."""
    import_all("kvferry_cli", (*ROUTER_EXTRA, *RUNTIME_EXTRA, "matplotlib"))


@pytest.mark.parametrize("name", ["kvferry_text", "kvferry_service", "kvferry_router"])
def test_the_router_imports_without_the_engines_libraries(name: str) -> None:
    """The router's image holds no torch."""
    import_all(name, RUNTIME_EXTRA)


def test_the_declared_layers_hold() -> None:
    """The contracts of `.importlinter` are kept."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout[-4000:]


def test_torch_is_in_the_runtime_extra_alone() -> None:
    """Operator and router install without it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    heavy = ("torch", "numpy", "transformers")
    assert not [line for line in project["dependencies"] if line.startswith(heavy + ROUTER_EXTRA)]
    for name in ("router", "operator"):
        assert not [line for line in extras[name] if line.startswith(heavy)]
        assert "kvferry[runtime]" not in " ".join(extras[name])
    assert [line for line in extras["runtime"] if line.startswith("torch")]


def test_dependencies_have_a_lower_bound_and_are_locked() -> None:
    """What a user gets is what was tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {package["name"] for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    for line in lines:
        name = line.partition(">=")[0].partition("[")[0].strip().lower()
        assert name in locked, line
        assert ">=" in line or name == "kvferry" or name.startswith("types-"), line


def test_the_command_is_installed_under_its_name() -> None:
    """`kvferry` is `kvferry_cli.main:main`, and that exists."""
    from kvferry_cli.main import main

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"kvferry": "kvferry_cli.main:main"}
    assert callable(main)
    assert len(packages()) >= 7
