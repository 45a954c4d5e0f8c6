"""A real API server for all tests of this folder; where its programs are absent, they are skipped with the reason."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvferry_operator.api.service import API_VERSION
from tests.support.api_server import ApiServer
from tests.support.cluster_tools import tools_or_skip

ROOT = Path(__file__).parents[2]
KINDS = ("InferenceService", "InferenceServiceRole")


def started(factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    server = ApiServer(tools_or_skip("apiserver"), factory.mktemp("apiserver"))
    try:
        server.start()
        yield server
    finally:
        server.close()


def install_crds(server: ApiServer) -> None:
    """Apply ``crds/`` and wait until both kinds are served."""
    server.apply_all([yaml.safe_load(path.read_text("utf-8")) for path in sorted((ROOT / "crds").glob("*.yaml"))])
    server.await_kinds(API_VERSION, *KINDS)


@pytest.fixture(scope="session")
def bare_api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server without our CRDs, for what installs and removes them itself: one test at a time has its use."""
    yield from started(tmp_path_factory)


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server with our CRDs. Tests work in namespaces of their own (``api_server.namespace()``).

    A test that stops it starts it again, whatever happens.
    """
    for server in started(tmp_path_factory):
        install_crds(server)
        yield server


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """A fresh namespace of ``api_server``."""
    return api_server.namespace()
