"""Servers, a tiny model, and options that wait for nothing."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry_runtime.model.fetch import FetchOptions, download, place
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.runtime.model.fetch.servers import FileServer, file_server
from tests.support.checkpoints import make_checkpoint

LIMITS = msgspec.structs.replace(DEFAULT_LIMITS, fetch_stall_s=5.0, fetch_s=60.0)
QUIET = FetchOptions(show="none", limits=LIMITS)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once; no proxy and no token of this machine is used."""
    monkeypatch.setattr(download, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(place, "LOCK_POLL_S", 0.01)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


@pytest.fixture
def other() -> Iterator[FileServer]:
    """A second server, on another port."""
    with file_server() as running:
        yield running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny checkpoint of two shards, not yet on any server."""
    return make_checkpoint(tmp_path / "tiny", shards=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where fetched models go."""
    return tmp_path / "models"
