"""What no program of ours may do: load objects, run text, trust a stranger's word, listen to everyone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, package_files, shown, tree_of

# Modules that build objects from bytes, or run what they read.
FORBIDDEN_MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "imp", "code", "codeop",
    "multiprocessing", "xmlrpc", "pty", "telnetlib", "pdb",
}  # fmt: skip
# By their whole names, whatever they are called where they are used. Their parts are forbidden with them.
FORBIDDEN_NAMES = {
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all",
    "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.CLoader",
    "torch.load", "torch.jit.load", "torch.hub", "torch.package", "torch.utils.model_zoo", "numpy.load",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp",
    "jinja2.Environment", "jinja2.Template", "jinja2.NativeEnvironment", "jinja2.nativetypes",
    "jinja2.sandbox.SandboxedEnvironment", "ssl._create_unverified_context", "ssl.CERT_NONE",
    "shutil.unpack_archive",
}  # fmt: skip
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "extractall"}
FORBIDDEN_KEYWORDS = {
    ("shell", True), ("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False), ("verify", False),
    ("verify_ssl", False), ("ssl", False), ("check_hostname", False),
}  # fmt: skip
EVERYWHERE = ("0.0.0.0", "tcp://*", "[::]")
BUILTINS = {"eval", "exec", "compile", "__import__"}


def scripts() -> list[Path]:
    """What runs beside the packages: when images are built, on a cluster, and to measure."""
    folders = ("images", "benchmarks", "e2e")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def meanings(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, as a dotted name; also of imports inside functions."""
    found = {name: f"builtins.{name}" for name in BUILTINS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """The whole name of an expression such as ``np.load``; empty where it is none."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, known)):
        return f"{base}.{node.attr}"
    return ""


def forbidden(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in FORBIDDEN_MODULES or any(".".join(parts[:end]) in FORBIDDEN_NAMES for end in range(1, 9))


def violations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names of what is forbidden in a module."""
    known = meanings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, f"import {one.name}") for one in names if forbidden(one.name))
            case ast.ImportFrom(module=str(module), names=names, level=0):
                whole = [f"{module}.{one.name}" for one in names]
                yield from ((node.lineno, f"import {name}") for name in whole if forbidden(name))
            case ast.Attribute() | ast.Name() if forbidden(name := dotted(node, known)):
                yield node.lineno, name
            case ast.Attribute(attr=name) if name in FORBIDDEN_METHODS:
                yield node.lineno, name
            case ast.keyword(arg=str(name), value=ast.Constant(value=value)) if (name, value) in FORBIDDEN_KEYWORDS:
                if isinstance(value, bool):
                    yield node.value.lineno, f"{name}={value}"
            case ast.Constant(value=str(text)) if text.startswith(EVERYWHERE) or text == "::":
                yield node.lineno, f"the address {text!r}"


@pytest.mark.parametrize("file", package_files(), ids=shown)
def test_no_module_uses_what_is_forbidden(file: Path) -> None:
    """No pickles, no eval, no unsafe YAML, no unsafe tensor file, no shell, no bind to every address."""
    assert not [f"{shown(file)}:{line}: {what}" for line, what in violations(tree_of(file))]


# A benchmark that compares with two bare processes talks to its own child, over a pipe that nobody else has.
BETWEEN_OWN = {"benchmarks/transfer.py": {"import multiprocessing", "multiprocessing"}}


@pytest.mark.parametrize("file", scripts(), ids=shown)
def test_no_script_does_either(file: Path) -> None:
    """Those that build images, run a cluster or measure."""
    excused = BETWEEN_OWN.get(shown(file), set())
    found = [
        f"{shown(file)}:{line}: {what}"
        for line, what in violations(tree_of(file))
        if not any(what.startswith(name) for name in excused)
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from dill import loads",
        "from multiprocessing.connection import Client",
        "import _pickle",
        "def f():\n    from pickle import loads as read",
        "eval('1')",
        "run = exec\nrun(text)",
        "import builtins\nbuiltins.eval(text)",
        "from builtins import exec as go",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import load",
        "from yaml import unsafe_load as safe",
        "import yaml as y\ny.load_all(text)",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load",
        "import torch.hub",
        "import numpy as np\nnp.load(path)",
        "import numpy\nnumpy.load(path, allow_pickle=False)",
        "import os\nos.system(text)",
        "from os import popen",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Template",
        "from jinja2.sandbox import SandboxedEnvironment",
        "import shutil\nshutil.unpack_archive(path)",
        "archive.extractall(path)",
        "socket.recv_pyobj()",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "read(path, allow_pickle=True)",
        "read(path, weights_only=False)",
        "TCPConnector(ssl=False)",
        "import ssl\ncontext.verify_mode = ssl.CERT_NONE",
        "socket.bind(('0.0.0.0', 80))",
        "socket.bind('tcp://*:80')",
        "site = TCPSite(runner, '::', 80)",
    ],
)
def test_the_scan_finds_each_kind(source: str) -> None:
    """The scan itself is tried on one line of each kind, also under another name."""
    assert list(violations(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile(x)",
        "import json\njson.load(f)",
        "text = 'a 0.0.0.0 b'",
        "import yaml\nyaml.safe_load(text)",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment",
        "from safetensors import safe_open as load\nload(path)",
        "subprocess.run(command, shell=False)",
        "import torch\ntorch.compile(model)",
    ],
)
def test_the_scan_leaves_harmless_lines_alone(source: str) -> None:
    """Methods and texts that only look alike are no violation."""
    assert not list(violations(ast.parse(source)))
