"""Leases and deadlines are durations on clocks that nobody sets: a wall clock that jumps by an hour changes none.

The wall clock is read for what people see: the `created` field of answers, and log lines.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("runtime/kvferry_wire", "runtime/kvferry_runtime", "router/kvferry_router")
WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow", "date.today"}
# Each reads it for the client's `created`, in whole seconds.
SHOWN = {
    "runtime/kvferry_runtime/server/pod.py": 1,
    "runtime/kvferry_runtime/server/routes_openai.py": 1,
    "router/kvferry_router/app.py": 2,
}


def wall_clock_reads(source: str) -> Iterator[str]:
    """Every name of the wall clock that the source uses, called or handed on."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ".".join(ast.unparse(node).split(".")[-2:])
            if name in WALL:
                yield name
        elif isinstance(node, ast.ImportFrom) and node.module in {"time", "datetime"}:
            yield from (f"{node.module}.{each.name}" for each in node.names if f"{node.module}.{each.name}" in WALL)


def test_only_what_people_see_comes_from_the_wall_clock() -> None:
    """Core, transfer, engine, router's decisions: none of them asks what time of day it is."""
    found = {}
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            reads = list(wall_clock_reads(path.read_text("utf-8")))
            if reads:
                found[str(path.relative_to(ROOT))] = len(reads)
    assert found == SHOWN


def test_the_search_finds_each_way_of_asking() -> None:
    """Called, handed on as a clock, or imported by name."""
    source = "import time, datetime\nfrom time import time_ns\na = time.time()\nb = Clock(time.time)\n"
    source += "c = datetime.datetime.now()\nd = time.monotonic()\n"
    assert sorted(wall_clock_reads(source)) == ["datetime.now", "time.time", "time.time", "time.time_ns"]
