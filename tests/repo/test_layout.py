"""The repository's layout: what lets every module be found, and none be shadowed."""

import sys
import tomllib

from tests.repo.sources import ROOT, ROOTS, packages, shown


def test_root_folders_are_no_packages_and_hold_no_modules() -> None:
    """`operator/__init__.py` would replace the standard library's `operator` for everything started here."""
    stray = [file for root in ROOTS for file in (ROOT / root).glob("*.py")]
    assert not stray


def test_no_script_has_the_name_of_a_library() -> None:
    """The folder of a script that runs comes first in the search: a neighbour would be imported for the library."""
    scripts = [file for file in (ROOT / "benchmarks").glob("*.py") if file.stem in sys.stdlib_module_names]
    assert not [shown(file) for file in scripts]
    assert "operator" in sys.stdlib_module_names


def test_every_folder_of_the_tests_is_a_package() -> None:
    """A leaf alone with an `__init__.py` would become a top-level package, such as `operator`."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not [shown(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_every_folder_of_a_package_is_a_package() -> None:
    """A folder without `__init__.py` would be left out of what is type-checked and built."""
    folders = {file.parent for package in packages() for file in package.rglob("*.py")}
    assert not [shown(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_packages_are_typed_built_and_importable_in_place() -> None:
    """Each package has its `py.typed`, is in the wheel, in the editable install, for mypy and for the layers."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = (ROOT / ".importlinter").read_text()
    names = [package.name for package in packages()]
    assert not [name for package, name in zip(packages(), names, strict=True) if not (package / "py.typed").exists()]
    assert sorted(config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == [
        shown(package) for package in packages()
    ]
    assert set(config["tool"]["hatch"]["build"]["dev-mode-dirs"]) == set(ROOTS)
    assert sorted(config["tool"]["mypy"]["packages"]) == sorted(names)
    assert not [name for name in names if f"\n    {name}\n" not in layers]


def test_the_standard_librarys_operator_is_the_one_imported() -> None:
    """Our folder of that name never wins."""
    import operator

    assert operator.add(1, 2) == 3
    assert "kvferry" not in str(operator.__file__)
