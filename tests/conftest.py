"""Shared fixtures. Processes started by tests inherit one compute thread each, so that two engines share two cores."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

API_SERVER = "tests/apiserver/"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Workers take tests one by one, except that one of them has all that need an API server: there is one server."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return API_SERVER if nodeid.startswith(API_SERVER) else nodeid

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's folder, fetched once per machine (93 MB).

    Where it cannot be fetched the tests that need it are skipped, except under ``CI``, where that is a failure.
    """
    from kvferry_runtime.model.fetch import FetchError, default_root, fetch

    try:
        return fetch("smollm2-135m-instruct", default_root(), progress=False)
    except FetchError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture
def open_files() -> Iterator[set[str]]:
    """Fails a test that leaves more sockets open in this process than it found."""
    before = _sockets()
    yield before
    leaked = _sockets() - before
    assert not leaked, f"sockets left open: {sorted(leaked)}"


def _sockets() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed between the listing and the look
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found
