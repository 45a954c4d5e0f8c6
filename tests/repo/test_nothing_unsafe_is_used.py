"""What no package of ours may do: load objects, run text, listen to everyone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.sources import package_files, shown, tree_of

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "imp"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all"}
FORBIDDEN_CALLS = {
    ("yaml", "load"),
    ("yaml", "load_all"),
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("os", "system"),
}
EVERYWHERE = ("0.0.0.0", "tcp://*", "[::]")


def violations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names of what is forbidden in a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.partition(".")[0] in FORBIDDEN_MODULES:
                        yield node.lineno, f"import {alias.name}"
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in FORBIDDEN_MODULES:
                yield node.lineno, f"from {module} import"
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_BUILTINS:
                yield node.lineno, f"{name}()"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=base), attr=name)) if (base, name) in FORBIDDEN_CALLS:
                yield node.lineno, f"{base}.{name}()"
            case ast.Attribute(attr=name) if name in FORBIDDEN_METHODS:
                yield node.lineno, name
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield node.value.lineno, "shell=True"
            case ast.Constant(value=str(text)) if text.startswith(EVERYWHERE) or text == "::":
                yield node.lineno, f"the address {text!r}"


@pytest.mark.parametrize("file", package_files(), ids=shown)
def test_no_module_uses_what_is_forbidden(file: Path) -> None:
    """No pickles, no eval, no unsafe YAML, no unsafe tensor file, no shell, no bind to every address."""
    assert not [f"{shown(file)}:{line}: {what}" for line, what in violations(tree_of(file))]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from dill import loads",
        "eval('1')",
        "exec(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "torch.load(path)",
        "socket.recv_pyobj()",
        "subprocess.run(text, shell=True)",
        "socket.bind(('0.0.0.0', 80))",
        "socket.bind('tcp://*:80')",
        "site = TCPSite(runner, '::', 80)",
    ],
)
def test_the_scan_finds_each_kind(source: str) -> None:
    """The scan itself is tried on one line of each kind."""
    assert list(violations(ast.parse(source)))


@pytest.mark.parametrize("source", ["model.eval()", "re.compile(x)", "json.load(f)", "text = 'a 0.0.0.0 b'"])
def test_the_scan_leaves_harmless_lines_alone(source: str) -> None:
    """Methods and texts that only look alike are no violation."""
    assert not list(violations(ast.parse(source)))
