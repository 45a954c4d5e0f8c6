"""An installation on the real API server, and clients that speak as its account."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from kubernetes.aio.client import ApiClient

from kvferry_operator.shell import connection
from tests.apiserver.operator.install import Installation
from tests.apiserver.operator.process import OperatorProcess
from tests.support.api_server import ApiServer


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failing test shows the logs of the operators that run."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]  # pluggy's, untyped here
    if report.failed:
        for process in OperatorProcess.alive:
            report.sections.append((f"log of {process.name}", process.log()))


@pytest.fixture
def installation(api_server: ApiServer, tmp_path: Path) -> Installation:
    """A release of its own that watches one namespace."""
    return Installation(api_server, tmp_path)


@pytest.fixture(scope="module")
def everywhere(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A release that watches all namespaces, for many tests that each take one."""
    return Installation(api_server, tmp_path_factory.mktemp("release"), clusterwide=True)


@pytest.fixture
async def client(everywhere: Installation) -> AsyncIterator[ApiClient]:
    """The operator's client, with its own account's token."""
    async with ApiClient(await connection.load(str(everywhere.kubeconfig))) as made:
        yield made
