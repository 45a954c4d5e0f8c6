"""Where the repository's sources are, for tests that read them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOTS = ("operator", "router", "kernels", "runtime")


def packages() -> list[Path]:
    """The import packages, below their root folders."""
    return sorted(path.parent for root in ROOTS for path in (ROOT / root).glob("*/__init__.py"))


def package_files() -> list[Path]:
    """Every Python file of the packages."""
    return sorted(file for package in packages() for file in package.rglob("*.py"))


def modules_of_tests() -> list[Path]:
    """Every test module."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


@cache
def tree_of(file: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(file.read_text("utf-8"), str(file))


def shown(file: Path) -> str:
    """A file's name for a message."""
    return str(file.relative_to(ROOT))
