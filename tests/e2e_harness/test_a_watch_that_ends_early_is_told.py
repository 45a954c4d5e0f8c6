"""A watch of a cluster's objects that ended says so: what nobody saw must not count as what did not happen."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from e2e.harness.service import Service
from e2e.harness.watching import PODS, WatchEndedError, watching

SERVICE = cast(Service, SimpleNamespace(selector="app=x", kubectl=SimpleNamespace(namespace="n")))
ADDED = '{"type": "ADDED", "object": {"metadata": {"name": "a"}}}'
EXPIRED = '{"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}'


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kubectl that prints lines, and then stays or ends."""

    def put(*lines: str, stays: bool) -> None:
        program = tmp_path / "kubectl"
        end = "import time; time.sleep(60)" if stays else ""
        program.write_text(f"#!{sys.executable}\nprint({chr(10).join(lines)!r}, flush=True)\n{end}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


class Seen:
    """The events that a watch handed over."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.told = threading.Event()

    def take(self, kind: str, found: dict[str, Any]) -> None:
        self.names.append(found["metadata"]["name"])
        self.told.set()


def test_one_that_lasts_hands_over_what_it_is_told(says: Any) -> None:
    """Nothing is raised at its end, and its process is gone."""
    says(ADDED, stays=True)
    seen = Seen()
    with watching(SERVICE, {PODS: seen.take}):
        assert seen.told.wait(20)
    assert seen.names == ["a"]
    assert not [thread for thread in threading.enumerate() if "_read" in thread.name]


def wait_until_none_reads() -> None:
    for thread in threading.enumerate():
        if "_read" in thread.name:
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((ADDED,), "its connection has ended"),
        ((ADDED, EXPIRED), "too old resource version"),
        ((ADDED, "not json"), "JSONDecodeError"),
        ((ADDED, '{"type": "ADDED", "object": {}}'), "KeyError"),
    ],
)
def test_one_that_ends_fails_the_test_around_it(says: Any, lines: tuple[str, ...], why: str) -> None:
    """With the reason: a lost connection, the API server's error, or words that nobody understands."""
    says(*lines, stays=False)
    with pytest.raises(WatchEndedError, match=why), watching(SERVICE, {PODS: Seen().take}):
        wait_until_none_reads()


def test_the_tests_own_failure_comes_first(says: Any) -> None:
    """A watch that ended hides no other fault, and may be why: it is noted beside it."""
    says(ADDED, EXPIRED, stays=False)
    with pytest.raises(ZeroDivisionError) as raised, watching(SERVICE, {PODS: Seen().take}):
        wait_until_none_reads()
        raise ZeroDivisionError
    (note,) = raised.value.__notes__
    assert "too old resource version" in note
