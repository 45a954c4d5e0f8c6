"""docs/testing.md says which test holds which case; the tests that it names must be there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "testing.md"


def test_every_named_test_exists() -> None:
    """Each `file::test` of the table is a function of that file."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE.read_text("utf-8"))
    assert len(named) > 40
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (path := ROOT / "tests" / file).is_file() or f"def {test}(" not in path.read_text("utf-8")
    ]
    assert not missing
