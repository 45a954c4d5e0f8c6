"""Habits that the contributor's guide asks for and a machine can see."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.sources import ROOT, modules_of_tests, package_files, shown, tree_of

MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|root|home/[a-z]+)/|/tmp/w/")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".cfg", ".sh", ""}


def functions(tree: ast.Module, prefix: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods by the start of their name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(prefix):
            yield node


@pytest.mark.parametrize("file", modules_of_tests(), ids=shown)
def test_every_test_says_what_holds(file: Path) -> None:
    """Each test function has a docstring: the claim that it checks."""
    bare = [node.name for node in functions(tree_of(file), "test_") if not ast.get_docstring(node)]
    assert not bare


@pytest.mark.parametrize("file", package_files(), ids=shown)
def test_every_module_says_what_is_inside(file: Path) -> None:
    """Each module that has anything in it has a docstring."""
    tree = tree_of(file)
    assert not tree.body or ast.get_docstring(tree), shown(file)


def silent(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last line of each place that swallows an error."""
    for node in ast.walk(tree):
        match node:
            case ast.ExceptHandler(body=[ast.Pass() | ast.Continue() | ast.Expr(value=ast.Constant())]):
                yield node.lineno, node.body[0].lineno
            case ast.With(items=items) if any("suppress(" in ast.unparse(each.context_expr) for each in items):
                yield node.lineno, node.lineno


def test_a_swallowed_error_has_its_reason_beside_it() -> None:
    """Whoever reads `pass` reads why that is right."""
    bare = []
    for file in (*package_files(), *(ROOT / "tests").rglob("*.py")):
        lines = file.read_text("utf-8").splitlines()
        bare += [
            f"{shown(file)}:{first}"
            for first, last in silent(tree_of(file))
            if not any("#" in line for line in lines[first - 1 : last])
        ]
    assert not bare


def test_swallowed_errors_are_seen() -> None:
    """Without its reason, in each of its forms."""
    forms = ("pass", "continue", "...")
    code = "".join(f"for _ in x:\n    try:\n        y()\n    except E:\n        {form}\n" for form in forms)
    assert len(list(silent(ast.parse(code + "with suppress(E):\n    y()\n")))) == len(forms) + 1


def tracked_files() -> list[Path]:
    """The files under version control; none where there is no repository."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return []
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30).stdout
    files = [ROOT / name for name in listed.decode().split("\0") if name]
    return [file for file in files if file.is_file() and file.suffix in TEXT_SUFFIXES]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    """What is committed works anywhere."""
    own = Path(__file__)
    found = [
        f"{shown(file)}:{number}"
        for file in tracked_files()
        if file != own
        for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert not found
